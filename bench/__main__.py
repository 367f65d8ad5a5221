"""Everything, one after the other, with the defaults.  python -m bench"""

import sys

from bench import core_overhead, http_peers, inprocess_peers, process_peers
from bench.documents import __main__ as documents

if len(sys.argv) > 1:
    sys.exit("no options here: `python -m bench.http_peers --help`, and so on for the others")
core_overhead.main()
sys.exit(max(documents.main(), inprocess_peers.main(), process_peers.main(), http_peers.main()))
