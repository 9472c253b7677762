"""Three kinds of plots as inline SVG: bars, curves and ranges, most of them logarithmic. The page sets the colours."""

from __future__ import annotations

import math
from html import escape
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

Format = Callable[[float], str]

#: Width in the drawing's own coordinates. The page scales it.
_WIDTH = 760
_LEFT, _RIGHT = 150, 70
_BAR, _GAP = 11, 3


class Bar(NamedTuple):
    """
    One line of a bar chart: a name, a note, a value per series, the bound and the required value. ``texts`` replaces
    the values at the bars' ends.
    """

    name: str
    note: str
    values: Dict[str, Optional[float]]
    bound: Optional[float] = None
    required: Optional[float] = None
    texts: Dict[str, str] = {}

    @property
    def marks(self) -> Dict[str, float]:
        """Class -> value of this line's own marks."""
        marks = {'bound': self.bound, 'required': self.required}
        return {kind: value for kind, value in marks.items() if value}


class Log:
    """Logarithmic scale from values to coordinates."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        good = [value for value in values if value > 0] or [1.0]
        self.low, self.high = 10 ** math.floor(math.log10(min(good))), 10 ** math.ceil(math.log10(max(good) * 1.01))
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        if self.low == self.high:  # a single value is drawn in the middle
            return round((self._begin + self._end) / 2, 1)
        clipped = min(max(value, self.low), self.high)
        share = math.log(clipped / self.low) / math.log(self.high / self.low)
        return round(self._begin + share * (self._end - self._begin), 1)

    @property
    def ticks(self) -> List[float]:
        count = round(math.log10(self.high / self.low))
        every = max(1, math.ceil(count / 6))
        return [self.low * 10.0**i for i in range(0, count + 1, every)]


class Linear:
    """Linear scale from values to coordinates, starting at 0."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        most = max([*values, 1e-9]) * 1.05  # room for the text at the end
        power = 10 ** math.floor(math.log10(most))
        self._step = next(power * part for part in (0.2, 0.5, 1, 2) if most <= power * part * 6)
        self._high = self._step * math.ceil(most / self._step)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        return round(self._begin + min(value, self._high) / self._high * (self._end - self._begin), 1)

    @property
    def ticks(self) -> List[float]:
        return [self._step * i for i in range(round(self._high / self._step) + 1)]


Scale = Union[Log, Linear]


def bars(lines: Sequence[Bar], form: Format, marks: Dict[str, float], scale_of: Type[Scale] = Log) -> str:
    """
    Overview:
        Draw horizontal bars, a group per line, with thin marks at each line's bound and required value.
    Arguments:
        - marks (:obj:`dict`): Label -> required value, drawn as a line through all groups.
        - scale_of (:obj:`type`): Class of the scale.
    """
    names = list(lines[0].values)
    group = len(names) * (_BAR + _GAP) + 15
    head = 30 if marks else 4
    height = head + 4 + group * len(lines) + 22
    known = [value for line in lines for value in [*line.values.values(), *line.marks.values()] if value]
    scale = scale_of([*known, *marks.values()], _LEFT, _WIDTH - _RIGHT)
    drawn = [_grid(scale, head, height - 22, form)]
    drawn += [_mark(scale(value), label, height) for label, value in marks.items()]
    for i, line in enumerate(lines):
        top = head + 6 + i * group
        middle = top + len(names) * (_BAR + _GAP) / 2
        drawn.append(_text(_LEFT - 12, middle - 1, line.name, 'name', 'end'))
        drawn.append(_text(_LEFT - 12, middle + 11, line.note, 'note', 'end'))
        own = [scale(value) for value in line.marks.values()]
        avoided = [*own, *(scale(value) for value in marks.values())]
        for k, (series, value) in enumerate(line.values.items()):
            text = '' if value is None else line.texts.get(series, form(value))
            drawn.append(_bar(scale, top + k * (_BAR + _GAP), series, value, text, line.name, avoided))
        for at, (kind, value) in zip(own, line.marks.items()):
            title = f'<title>{escape(line.name)}, {kind}: {form(value)}</title>'
            bottom = top + len(names) * (_BAR + _GAP)
            drawn.append(f'<path class="{kind} own" d="M{at} {top - 2}V{bottom}">{title}</path>')
    return _svg(_WIDTH, height, drawn)


def _bar(
    scale: Scale, top: float, series: str, value: Optional[float], text: str, name: str, marks: Sequence[float]
) -> str:
    if value is None:
        return _text(_LEFT + 6, top + _BAR - 1.5, 'no figures', 'none', 'start')
    end = scale(value)
    title = f'<title>{escape(name)}, {series}: {escape(text)}</title>'
    box = f'<rect class="{series}" x="{_LEFT}" y="{top}" width="{max(2, end - _LEFT):.1f}" height="{_BAR}" rx="2">'
    place = end + 6
    for mark in sorted(marks):
        if place - 6 <= mark <= place + 7 * len(text) + 4:  # move a text that would overlap the mark behind it
            place = mark + 6
    return f'{box}{title}</rect>' + _text(place, top + _BAR - 1.5, text, 'value', 'start')


def curves(
    series: Dict[str, Sequence[Tuple[float, float]]], xform: Format, yform: Format, mark: Optional[float] = None
) -> str:
    """Draw one curve per series, both scales logarithmic. ``mark`` is a labelled horizontal line."""
    width, height, left, right, top, bottom = 300, 220, 46, 30, 12, 28
    points = [point for each in series.values() for point in each]
    x = Log([x for x, _ in points], left, width - right)
    # The points are few and close together: scale from the first to the last.
    x.low, x.high = min(x for x, _ in points), max(x for x, _ in points)
    y = Log([y for _, y in points] + ([mark] if mark else []), height - bottom, top)
    drawn: List[str] = []
    for tick in y.ticks:
        drawn.append(f'<path class="grid" d="M{left} {y(tick)}H{width - right}"/>')
        drawn.append(_text(left - 8, y(tick) + 3.5, yform(tick), 'tick', 'end'))
    drawn += [
        _text(x(value), height - 10, xform(value), 'tick', 'middle') for value in sorted({value for value, _ in points})
    ]
    if mark:
        drawn.append(f'<path class="required" d="M{left} {y(mark)}H{width - right}"/>')
    for name, each in series.items():
        path = 'M' + 'L'.join(f'{x(a)} {y(b)}' for a, b in each)
        drawn.append(f'<path class="curve {name}" d="{path}"/>')
        for a, b in each:
            title = f'<title>{name}: {yform(b)} at {xform(a)}</title>'
            drawn.append(f'<circle class="{name}" cx="{x(a)}" cy="{y(b)}" r="4">{title}</circle>')
    if mark:
        # Place the label away from the curves, which begin at the left above or below the mark.
        below = any(abs(y(mark) - 10 - y(each[0][1])) < 12 for each in series.values())
        drawn.append(_text(left + 4, y(mark) + (13 if below else -5), f'required {yform(mark)}', 'mark', 'start'))
    return _svg(width, height, drawn)


def ranges(lines: Sequence[Tuple[str, Dict[str, Sequence[float]]]], form: Format) -> str:
    """Draw percentiles: a line per series with a dot at each percentile, the first one filled."""
    names = list(lines[0][1])
    group = len(names) * 13 + 12
    height = 12 + group * len(lines) + 22
    scale = Log([value for _, each in lines for values in each.values() for value in values], _LEFT, _WIDTH - _RIGHT)
    drawn = [_grid(scale, 4, height - 22, form)]
    for i, (name, each) in enumerate(lines):
        top = 10 + i * group
        drawn.append(_text(_LEFT - 12, top + len(names) * 6.5, name, 'name', 'end'))
        for k, (series, values) in enumerate(each.items()):
            y = top + 4 + k * 13
            drawn.append(f'<path class="range {series}" d="M{scale(values[0])} {y}H{scale(values[-1])}"/>')
            for n, value in enumerate(values):
                title = f'<title>{escape(name)}, {series}: {form(value)}</title>'
                drawn.append(
                    f'<circle class="{series if n == 0 else series + " hollow"}" cx="{scale(value)}" cy="{y}" '
                    f'r="{4.5 if n == 0 else 3.2}">{title}</circle>'
                )
            drawn.append(_text(scale(values[-1]) + 10, y + 3.5, form(values[-1]), 'value', 'start'))
    return _svg(_WIDTH, height, drawn)


def _grid(scale: Scale, top: float, bottom: float, form: Format) -> str:
    lines = [
        f'<path class="grid" d="M{scale(tick)} {top}V{bottom}"/>'
        + _text(scale(tick), bottom + 16, form(tick), 'tick', 'middle')
        for tick in scale.ticks
    ]
    return ''.join(lines)


def _mark(at: float, label: str, height: float) -> str:
    return f'<path class="required" d="M{at} 22V{height - 22}"/>' + _text(at, 15, label, 'mark', 'middle')


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img">{"".join(drawn)}</svg>'
