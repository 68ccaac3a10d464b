"""Building blocks of a dashboard in Grafana's JSON: grid, variables, annotations, a method for each kind of panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvpressure.bundle.dashboards.harm import BLUE, LISTED, ORANGE, RED
from kvpressure.bundle.dashboards.queries import CONTAINER, DATASOURCE, Json, PanelQuery
from kvpressure.bundle.values import BundleValues
from kvpressure.settings.thresholds import Thresholds

SCHEMA_VERSION: Final = 39
WIDTH: Final = 24
NOT_A_POD: Final = "the exporter does not read pods"
NO_BASELINE: Final = "the engine has not yet had enough calm traffic for a baseline"

Marks = Sequence[tuple[str, str | int]]
"""Colours, each from a threshold (by name) or number upwards."""
Property = tuple[str, Any]
COLORED: Final[Property] = ("custom.cellOptions", {"type": "color-text"})
FILLED: Final[Property] = ("custom.cellOptions", {"type": "color-background", "mode": "basic"})
SHARE: Final[tuple[Property, ...]] = (("unit", "percentunit"), ("decimals", 0))


@dataclass(frozen=True, slots=True)
class DashboardContext:
    """Inputs of all dashboards: thresholds, and the site's links."""

    thresholds: Thresholds
    values: BundleValues

    def runbook_links(self, title: str, alert: str) -> list[Json]:
        """A link to the runbook of ``alert``; empty where no address of runbooks is configured."""
        url = self.values.runbook(alert)
        return [{"title": title, "url": url, "targetBlank": True}] if url else []


@dataclass(slots=True)
class PanelGrid:
    """Places panels from left to right on the 24 columns."""

    x: int = 0
    y: int = 0
    height: int = 0

    def place(self, width: int, height: int) -> Json:
        """Position of the next panel. Raises ``ValueError`` for one wider than the grid."""
        if not 0 < width <= WIDTH:
            raise ValueError(f"a panel of {width} columns does not fit on {WIDTH}")
        if self.x + width > WIDTH:
            self.wrap()
        position = {"h": height, "w": width, "x": self.x, "y": self.y}
        self.x += width
        self.height = max(self.height, height)
        return position

    def wrap(self) -> None:
        """Start a new line below everything placed so far."""
        self.x, self.y, self.height = 0, self.y + self.height, 0


# --- variables, links, annotations ---------------------------------------------------------------------------


OF_FLEET: Final = ("cluster", "namespace", "model", "pool")
OF_ENGINES: Final = (*OF_FLEET, "pod", "gpu")
_LABELS: Final = {"model": "model_name", "gpu": "uuid"}  # of the variables that are not called like their label
_TITLES: Final = {"gpu": "GPU"}
_SOURCES: Final = {"pool": "kvpressure_engine_pool_info", "gpu": "kvpressure_engine_gpu_info"}


def _label(variable: str) -> str:
    return _LABELS.get(variable, variable)


def variables(names: Sequence[str]) -> list[Json]:
    """Data source, then ``names``, each filtered by those before it."""
    source: Json = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "regex": "",
        "current": {},
        "options": [],
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "refresh": 1,
        "skipUrlSync": False,
    }
    return [source, *(_query_variable(name, names[: names.index(name)]) for name in names)]


def _query_variable(name: str, before: Sequence[str]) -> Json:
    where = ",".join(f'{_label(one)}=~"${one}"' for one in before if one != "pool")  # not a label of every metric
    query = f"label_values({_SOURCES.get(name, 'kvpressure_engine_info')}{{{where}}}, {_label(name)})".replace("{}", "")
    # .* and not .+ for All: a series without a cluster (or, for a static target, a pod) label has to match too.
    return {
        "name": name,
        "label": _TITLES.get(name, name.capitalize()),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "definition": query,
        "regex": "",
        "sort": 1,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {},
        "options": [],
        "hide": 0,
        "skipUrlSync": False,
    }


def firing(names: Sequence[str], which: str = LISTED) -> str:
    """Firing alerts of this bundle, about what is chosen or about what no variable chooses."""
    chosen = ",".join(f'{_label(name)}=~"${name}|"' for name in names if name != "gpu")
    return f"ALERTS{{{which},{chosen}}}"


def _annotation(name: str, color: str, expr: str, title: str, text: str) -> Json:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expr,
        "titleFormat": title,
        "textFormat": text,
        "step": "60s",
        "useValueForTime": False,
    }


def _link(title: str, kind: str, **more: Any) -> Json:
    return {
        "title": title,
        "type": kind,
        "url": "",
        "icon": "external link",
        "tags": [],
        "asDropdown": False,
        "includeVars": False,
        "keepTime": False,
        "targetBlank": False,
        "tooltip": "",
        **more,
    }


# --- mappings and overrides ------------------------------------------------------------------------------------


def texts(**names: tuple[str, str]) -> list[Json]:
    """Value mapping for 0/1 values and names: key -> (shown text, colour); ``v0`` means the value 0."""
    options = {
        (key[1:] if key[0] == "v" and key[1:].isdigit() else key): {"text": text, "color": color, "index": index}
        for index, (key, (text, color)) in enumerate(names.items())
    }
    return [{"type": "value", "options": options}]


NO_TRAFFIC: Final[list[Json]] = [
    {"type": "special", "options": {"match": "nan", "result": {"text": "no traffic", "color": "text", "index": 90}}}
]


def column(name: str, *properties: Property) -> Json:
    """Override for one column or series, by its displayed name."""
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties],
    }


def matching(pattern: str, *properties: Property) -> Json:
    """Override for all series whose displayed name matches ``pattern``."""
    return {**column("", *properties), "matcher": {"id": "byRegexp", "options": pattern}}


def fixed(pattern: str, color: str) -> Json:
    """Override with one colour."""
    return matching(pattern, ("color", {"mode": "fixed", "fixedColor": color}))


# --- the dashboard -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Dashboard:
    """A dashboard under construction, whose panels follow one another from left to right. ``variables``: their
    names.
    """

    title: str
    description: str
    site: DashboardContext
    variables: tuple[str, ...]
    panels: list[Json] = field(default_factory=list)
    layout: PanelGrid = field(default_factory=PanelGrid)
    optional: dict[tuple[str, str], str] = field(default_factory=dict)  # (panel title, refId) -> why it may be empty

    def model(self, uid: str) -> Json:
        """The whole dashboard as Grafana's JSON."""
        annotations = [
            _annotation(
                "Firing alerts", RED, firing(self.variables), "{{alertname}}", "{{severity}} {{namespace}} {{pod}}"
            )
        ]
        if "gpu" in self.variables:  # the exporter's containers
            restarts = f"changes(kvpressure_container_restarts_total{{{CONTAINER}}}[2m]) > 0"
            text = "{{namespace}} {{pod}} {{container}}"
            annotations.append(_annotation("Restarts", BLUE, restarts, "container restarted", text))
        others = {"tags": ["kvpressure"], "asDropdown": True, "includeVars": True, "keepTime": True}
        return {
            "uid": uid,
            "id": None,
            "title": self.title,
            "description": self.description,
            "tags": ["kvpressure"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "timezone": "browser",
            "weekStart": "",
            "fiscalYearStartMonth": 0,
            "liveNow": False,
            "time": {"from": "now-1h", "to": "now"},
            "timepicker": {},
            "annotations": {"list": annotations},
            "links": [
                _link("kvpressure dashboards", "dashboards", **others),
                *(_link(icon="doc", kind="link", **link) for link in self.site.runbook_links("Runbooks", "README")),
            ],
            "templating": {"list": variables(self.variables)},
            "panels": self.panels,
        }

    def drill(self, uid: str, title: str, **chosen: str) -> Property:
        """Makes a column a link to another dashboard, with the same time and variables; some come from the row."""
        kept = [f"${{{name}:queryparam}}" for name in ("datasource", *self.variables) if name not in chosen]
        query = "&".join([*kept, *(f"var-{name}={value}" for name, value in chosen.items())])
        return ("links", [{"title": title, "url": f"/d/{uid}?{query}&${{__url_time_range}}", "targetBlank": False}])

    def steps(self, marks: Marks, base: str = "text") -> Json:
        """Colour bands: ``base``, which means nothing, then those of ``marks``."""
        bands = [(base, None), *((color, self._number(mark)) for color, mark in marks)]
        return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in bands]}

    def marked(self, *marks: tuple[str, str | int]) -> tuple[Property, ...]:
        """Properties of a column whose numbers take the colours of ``marks``."""
        return (("thresholds", self.steps(marks)), COLORED)

    def _number(self, mark: str | int) -> float:
        return self.site.thresholds[mark] if isinstance(mark, str) else float(mark)

    def row(self, title: str) -> None:
        """Start a row that the following panels belong to."""
        self.layout.wrap()
        self._place({"type": "row", "title": title, "collapsed": False, "panels": []}, WIDTH, 1)
        self.layout.wrap()

    def _place(self, panel: Json, width: int, height: int) -> None:
        self.panels.append({"id": len(self.panels) + 1, "gridPos": self.layout.place(width, height), **panel})

    def _panel(
        self,
        kind: str,
        title: str,
        about: str,
        queries: Sequence[PanelQuery],
        size: tuple[int, int],
        defaults: Json,
        options: Json,
        overrides: Sequence[Json] = (),
        **more: Any,
    ) -> None:
        optional = {
            query.model(index)["refId"]: query.optional for index, query in enumerate(queries) if query.optional
        }
        self.optional |= {(title, ref): why for ref, why in optional.items()}
        if len(optional) == len(queries) and kind != "stat":  # a tile has no room for a sentence
            defaults = {**defaults, "noValue": next(iter(optional.values()))}
        panel = {
            "datasource": DATASOURCE,
            "type": kind,
            "title": title,
            "description": "\n\n".join([about, *_empty_if(queries)]),
            "targets": [query.model(index) for index, query in enumerate(queries)],
            "fieldConfig": {"defaults": defaults, "overrides": list(overrides)},
            "options": options,
            **more,
        }
        self._place(panel, *size)

    def tile(self, title: str, about: str, expr: str, marks: Marks = (), unit: str = "short") -> None:
        """One number for the selection."""
        defaults = _defaults(unit, self.steps(marks), color={"mode": "thresholds"})
        options = {
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "value",
            "wideLayout": True,
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
        self._panel("stat", title, about, [PanelQuery(expr)], (8, 3), defaults, options)

    def graph(
        self,
        title: str,
        about: str,
        queries: Sequence[PanelQuery],
        unit: str,
        marks: Marks = (),
        *,
        dashed: str = "",
        right: str = "",
        top: float | None = None,
        overrides: Sequence[Json] = (),
        size: tuple[int, int] = (8, 8),
        stacked: bool = False,
    ) -> None:
        """Lines over time, with a dashed line at each mark. ``dashed``: a pattern of the last word of names whose lines
        are dashed, so that two kinds are distinguishable without colour; ``right``: the unit of these, which then
        have an axis of their own.
        """
        custom = {
            "drawStyle": "line",
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "fillOpacity": 40 if stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "thresholdsStyle": {"mode": "dashed" if marks else "off"},
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        }
        bounds: Json = {"min": 0} if top is None else {"min": 0, "max": top}
        defaults = _defaults(unit, self.steps(marks), custom=custom, color={"mode": "palette-classic"}, **bounds)
        wide = size[0] > 5
        options = {
            "legend": {
                "displayMode": "table" if wide else "list",
                "placement": "bottom",
                "showLegend": True,
                "calcs": ["lastNotNull", "mean", "max"] if wide else [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        style = [("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}), ("custom.fillOpacity", 0)]
        axis = [("unit", right), ("custom.axisPlacement", "right")] if right else []
        overrides = [*overrides, *([matching(f"/ ({dashed})$/", *style, *axis)] if dashed else [])]
        self._panel("timeseries", title, about, queries, size, defaults, options, overrides)

    def states(
        self,
        title: str,
        about: str,
        queries: Sequence[PanelQuery],
        mappings: Sequence[Json],
        overrides: Sequence[Json] = (),
        size: tuple[int, int] = (12, 9),
        shown: str = "never",
    ) -> None:
        """A state timeline: one bar per series while it exists; ``shown`` auto writes the state into it."""
        custom = {"fillOpacity": 80, "lineWidth": 0}
        defaults = _defaults("none", self.steps(()), mappings, color={"mode": "thresholds"}, custom=custom)
        options = {
            "alignValue": "left",
            "mergeValues": True,
            "rowHeight": 0.9,
            "showValue": shown,
            "perPage": 20,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
            "tooltip": {"mode": "single", "sort": "none"},
        }
        self._panel("state-timeline", title, about, queries, size, defaults, options, overrides)

    def table(
        self,
        title: str,
        about: str,
        queries: Sequence[PanelQuery],
        columns: Mapping[str, str],
        shown: Mapping[str, Sequence[Property]] | None = None,
        order: str = "",
        size: tuple[int, int] = (8, 7),
    ) -> None:
        """A paged table of current values; queries are merged on their common labels, and long names are wrapped.
        ``columns``: field -> heading, in this order; other fields are hidden. ``shown``: heading -> how. ``order``: the
        field that rows are ordered by, a value by the largest and a name by the alphabet. Unknown values are a dash.
        """
        defaults = {
            "unit": "none",
            "thresholds": self.steps(()),
            "mappings": [],
            "noValue": "-",
            "custom": {
                "align": "left",
                "minWidth": 50,
                "cellOptions": {"type": "auto", "wrapText": True},  # before Grafana 12
                "wrapText": True,
                "filterable": False,
                "inspect": False,
            },
        }
        options = {
            "showHeader": True,
            "cellHeight": "md",  # two lines
            "footer": {"show": False, "reducer": ["sum"], "countRows": False, "fields": "", "enablePagination": True},
            "sortBy": [],
        }
        values = [columns.get(f"Value #{chr(ord('A') + index)}", "") for index in range(len(queries))]
        queries = [
            replace(query, table=True, part=query.part or f'Column "{value}"')
            for query, value in zip(queries, values, strict=True)
        ]
        # The reason why a table may be empty is its default; it must not stand in an empty cell.
        cells = [matching(".*", ("noValue", "-")), *(column(name, *how) for name, how in (shown or {}).items())]
        sort = {"fields": {}, "sort": [{"field": order, "desc": order.startswith("Value")}]}
        transformations = [
            {"id": "merge", "options": {}},
            *([{"id": "sortBy", "options": sort}] if order else []),
            {"id": "filterFieldsByName", "options": {"include": {"names": list(columns)}}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {},
                    "indexByName": {name: index for index, name in enumerate(columns)},
                    "renameByName": {name: title for name, title in columns.items() if name != title},
                },
            },
        ]
        self._panel("table", title, about, queries, size, defaults, options, cells, transformations=transformations)


def _empty_if(queries: Sequence[PanelQuery]) -> list[str]:
    """For each reason a sentence about what of a panel is then empty."""
    optional = [query for query in queries if query.optional]
    reasons = list(dict.fromkeys(query.optional for query in optional))
    whole = len(reasons) == 1 and len(optional) == len(queries)
    sentences = []
    for why in reasons:
        either = why.replace(", or ", ", or if ")  # the reason alone, without "if", is the text of an empty panel
        parts = " and ".join(dict.fromkeys(query.part for query in optional if query.optional == why))
        verb = "are" if " and " in parts or "curves" in parts else "is"
        sentences.append(f"{'Empty' if whole else f'{parts} {verb} empty'} if {either}.")
    return sentences


def _defaults(unit: str, thresholds: Json, mappings: Sequence[Json] = (), **more: Any) -> Json:
    return {"unit": unit, "thresholds": thresholds, "mappings": [*mappings, *NO_TRAFFIC], "noValue": "no data", **more}


KV_FULL: Final[Marks] = ((ORANGE, "kv_near_full_ratio"), (RED, "kv_full_ratio"))
MEMORY_FULL: Final[Marks] = ((ORANGE, "memory_warning_ratio"), (RED, "memory_critical_ratio"))
UP: Final = texts(v0=("down", RED), v1=("up", BLUE))
