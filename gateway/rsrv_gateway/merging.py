"""Several Prometheus texts as one: each family has one HELP and one TYPE, and its samples are together. Pure."""

from collections.abc import Iterable

#: of samples that belong to a family by another name
_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created")


class _Family:
    def __init__(self) -> None:
        self.head: dict[str, str] = {}
        self.samples: list[str] = []


def merge(own: str, workers: Iterable[tuple[str, str]]) -> str:
    """`own`: without another label; `workers`: each one's name and text, whose samples get a label `worker`.

    What is no Prometheus text is left out. Of several HELPs and TYPEs of a family the first counts.
    """
    families: dict[str, _Family] = {}
    _take(families, own, "")
    for name, text in workers:
        _take(families, text, f'worker="{_escaped(name)}"')
    lines: list[str] = []
    for family in families.values():
        if family.samples:
            lines += family.head.values()
            lines += family.samples
    return "\n".join(lines) + "\n" if lines else ""


def _take(families: dict[str, _Family], text: str, label: str) -> None:
    for line in text.splitlines():
        if line.startswith("#"):
            words = line.split(maxsplit=3)
            if len(words) >= 3 and words[1] in ("HELP", "TYPE"):
                family = families.setdefault(words[2], _Family())
                family.head.setdefault(words[1], line)
            continue
        brace, space = line.find("{"), line.find(" ")
        end = brace if 0 <= brace < space or space < 0 else space
        if end <= 0:
            continue
        name, rest = line[:end], line[end:]
        if label:
            if rest.startswith("{"):
                inside = rest[1:].lstrip()
                rest = f"{{{label}{'' if inside.startswith('}') else ','}{inside}"
            else:
                rest = f"{{{label}}}{rest}"
        families.setdefault(_family(families, name), _Family()).samples.append(name + rest)


def _family(families: dict[str, _Family], sample: str) -> str:
    if sample not in families:
        for suffix in _SUFFIXES:
            if sample.endswith(suffix) and sample.removesuffix(suffix) in families:
                return sample.removesuffix(suffix)
    return sample


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
