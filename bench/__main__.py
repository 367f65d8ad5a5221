"""Everything, one after the other, with the defaults.  python -m bench"""

import sys

from bench import core_overhead, http_peers, process_peers

if len(sys.argv) > 1:
    sys.exit("no options here: `python -m bench.http_peers --help`, `python -m bench.process_peers --help`")
core_overhead.main()
sys.exit(max(process_peers.main(), http_peers.main()))
