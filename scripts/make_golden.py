"""Make the golden files of tests/golden: what this version writes, with plain contents beside it.

    python scripts/make_golden.py DIRECTORY     # a new directory; some minutes

The files are made once per format, and never written again while that format must be readable. tests/test_golden.py
reads them, and compares their checksums with MANIFEST.txt. A later format adds files of other names.

The expected contents come from the elements that the makers store. They are not read back, with two exceptions. A
killed table holds one of the few contents that its call allows, and the expected one is what this version found. Uses
are counted from the rows of the batches, since samplers choose them.

    tables/       directories of StoreBuffer(path=...), as archives; killed_* were killed in the middle of a call
    saves/        files of save_data
    checkpoints/  directories of CheckpointDir, as archives
    payloads/     entries as they are sent to Redis, one file each
    server/       all keys of a Redis server; of the host plane also the files in shared memory
    scripts/      calls of the Lua scripts, and the commands between them, with their replies
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict

from golden_makers.common import write_manifest
from golden_makers.files import make_checkpoints, make_payloads, make_saves
from golden_makers.scenario import make_calls
from golden_makers.server import make_cluster, make_server
from golden_makers.tables import make_tables


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith('-'):
        raise SystemExit(__doc__)
    golden = Path(sys.argv[1])
    golden.mkdir()  # Golden files are never written again.
    kinds: Dict[str, Callable[[Path, Path], None]] = {
        'tables': make_tables,
        'saves': make_saves,
        'checkpoints': make_checkpoints,
        'payloads': lambda golden, work: make_payloads(golden),
        'server': make_server,
        'cluster': lambda golden, work: make_cluster(golden),
        'scripts': lambda golden, work: make_calls(golden),
    }
    with tempfile.TemporaryDirectory() as directory:
        for kind, make in kinds.items():
            (golden / kind).mkdir()
            work = Path(directory) / kind
            work.mkdir()
            make(golden / kind, work)
            print(kind, flush=True)
    write_manifest(golden)


if __name__ == '__main__':
    main()
