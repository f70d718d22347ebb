"""Several Prometheus texts as one: each family has one HELP and one TYPE, and its samples are together. Pure.

Nothing that a worker says may spoil the scrape of all: what is not exactly a line of the text format is left out. A regular expression
decides, in some 3 us for each sample; prometheus_client's parser takes 22 us.
"""

import re
from collections.abc import Iterable
from typing import Final

#: of samples that belong to a family by another name
_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created")
# What has matched is not given back (`*+`): else a long line takes the square of its length.
_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
# Those that begin with two underscores are Prometheus's own.
_LABEL: Final = r'((?!__)[a-zA-Z_][a-zA-Z0-9_]*+)="[^"\\\n\0]*+(?:\\[\\"n][^"\\\n\0]*+)*+"'
_LABELS: Final = rf"{_LABEL}(?:[ \t]*+,[ \t]*+{_LABEL})*+"
_VALUE: Final = r"[+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?|[+-]?[Ii]nf|NaN|nan"
_TYPE: Final = r"(?:counter|gauge|histogram|summary|untyped)"
_HEAD = re.compile(rf"#[ \t]++(?:HELP[ \t]++({_NAME})(?:[ \t][^\0]*+)?|TYPE[ \t]++({_NAME})[ \t]++{_TYPE})")
_SAMPLE = re.compile(
    rf"(?P<name>{_NAME})(?:[ \t]*+\{{[ \t]*+(?P<labels>{_LABELS})?[ \t]*+(?:,[ \t]*+)?\}}|[ \t])"
    rf"[ \t]*+(?P<value>{_VALUE})(?:[ \t]++(?P<at>-?[0-9]{{1,18}}))?"
)
_ONE_LABEL = re.compile(_LABEL)


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
    # Other ends of lines than this may be in a label's value.
    for line in map(str.strip, text.split("\n")):
        if line.startswith("#"):
            if head := _HEAD.fullmatch(line):
                family = families.setdefault(head[1] or head[2], _Family())
                family.head.setdefault("TYPE" if head[1] is None else "HELP", line)
        elif found := _SAMPLE.fullmatch(line):
            labels = found["labels"] or ""
            names = _ONE_LABEL.findall(labels)
            if label:
                if "worker" in names:
                    # As Prometheus itself has it, where a label that it adds is there already.
                    names.append("exported_worker")
                    labels = _ONE_LABEL.sub(
                        lambda one: f"exported_{one[0]}" if one[1] == "worker" else one[0], labels
                    )
                labels = f"{label},{labels}" if labels else label
            if len({*names}) < len(names):
                continue
            name, value, at = found["name"], found["value"], found["at"]
            sample = f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"
            family = families.setdefault(_family(families, name), _Family())
            family.samples.append(sample if at is None else f"{sample} {at}")


def _family(families: dict[str, _Family], sample: str) -> str:
    if sample not in families:
        for suffix in _SUFFIXES:
            if sample.endswith(suffix) and sample.removesuffix(suffix) in families:
                return sample.removesuffix(suffix)
    return sample


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
