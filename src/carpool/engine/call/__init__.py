"""One call of user code: of a whole batch, in parts where that fails, with chunks merged and
padded.
"""
