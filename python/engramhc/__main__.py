"""`python -m engramhc info`, what this installation and this machine offer, and `... bench`."""

from __future__ import annotations

import argparse
import sys

import engramhc
from engramhc import bench


def info(_: argparse.Namespace) -> None:
    build, devices = engramhc.build_info(), engramhc.device_info()
    print(f"engramhc {engramhc.__version__}, library {build['version']}")
    print(f"operators           {len(build['operators'])}")
    print(f"threads             {devices['threads']}")
    print(f"instruction sets    {', '.join(build['instruction_sets'])}")
    print(f"matrix product      {build['matrix_product']}")
    print(f"CUDA                {'built in' if build['cuda'] else 'not in this build'}")
    for index, description in enumerate(devices["cuda"]):
        print(f"cuda:{index}              {description}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engramhc", description=engramhc.__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    commands.add_parser("info", help="show what this installation offers").set_defaults(run=info)
    bench.add_arguments(commands.add_parser("bench", help="measure beside PyTorch and installed peers"))
    options = parser.parse_args()
    sys.exit(options.run(options))


if __name__ == "__main__":
    main()
