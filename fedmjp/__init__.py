"""FedMJP: how much does a federated Vision Transformer leak, and what is a defence worth?"""

import sys
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"


def _refuse_other_attacks() -> None:
    """Refuse to go on where `import attacks` would find another package than the one installed beside this one.

    Raises:
        ImportError: naming the folder or file. `python -m fedmjp.COMMAND` prints it in one line and exits with 2.
    """
    own = Path(__file__).resolve().parent.parent / "attacks"
    spec = find_spec("attacks")
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    found = [Path(place).resolve() for place in places if place]
    if own in found[:1]:
        return
    problem = (
        f"{found[0]} hides FedMJP's own package 'attacks'; rename it, or start Python in another folder"
        if found
        else f"FedMJP's package 'attacks' is missing beside {own.parent / 'fedmjp'}; install it again"
    )
    if sys.argv[:1] == ["-m"]:  # Python is about to run a module of this package as a command
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(problem)


_refuse_other_attacks()
