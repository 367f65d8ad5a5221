"""One call of user code: around the model, in parts where it fails, merged and padded."""
