"""Requirements of an installed package, one a line, without those for images and sound.

It runs in vLLM's environment: only the standard library and pip may be imported.
"""

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def wanted(package: str) -> list[str]:
    """Requirements that hold here, their markers taken off."""
    found: list[str] = []
    for line in requires(package) or ():
        one = Requirement(line)
        if one.name in LEFT_OUT or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        one.marker = None
        found.append(str(one))
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(wanted(sys.argv[1])) + "\n")
