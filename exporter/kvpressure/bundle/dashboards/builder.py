"""Building blocks of a dashboard in Grafana's JSON: grid, queries, panels, thresholds and variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvpressure.advice.triage import NOTABLE_EVENTS
from kvpressure.bundle.dashboards.queries import CONTAINER, DATASOURCE, Json, PanelQuery
from kvpressure.bundle.values import BundleValues
from kvpressure.model.log_events import ALLOCATION_EVENTS
from kvpressure.settings.thresholds import Thresholds

SCHEMA_VERSION: Final = 39
WIDTH: Final = 24


# Okabe and Ito's palette, and Tol's wine: distinguished with any colour vision, and by their lightness.
GREEN, YELLOW, ORANGE, RED, BLUE = "#009E73", "#F0E442", "#E69F00", "#D55E00", "#56B4E9"
WINE, PURPLE = "#882255", "#CC79A7"
LOG_EVENTS: Final = "|".join(
    sorted(ALLOCATION_EVENTS | NOTABLE_EVENTS)
)  # lines that tell of trouble, not facts of the start


NOT_A_POD: Final = "the exporter does not read pods"
NO_BASELINE: Final = "the engine has not yet had enough calm traffic for a baseline"


@dataclass(frozen=True, slots=True)
class DashboardContext:
    """Inputs of all dashboards: thresholds, the site's links, and the alerts that exist."""

    thresholds: Thresholds
    values: BundleValues
    alerts: frozenset[str]

    def runbook_links(self, title: str, alert: str) -> list[Json]:
        """A link to the runbook of ``alert``; empty where no address of runbooks is configured."""
        known = self.values.runbook_base_url
        return [{"title": title, "url": self.values.runbook(alert), "targetBlank": True}] if known else []


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


@dataclass(slots=True)
class Dashboard:
    """A dashboard under construction; its variables take their values from the labels of the metric ``source``."""

    title: str
    description: str
    source: str = "kvpressure_engine_info"
    gpus: bool = True  # has a variable for GPUs, and annotations from the exporter's containers
    tags: tuple[str, ...] = ("kvpressure",)
    panels: list[Json] = field(default_factory=list)
    layout: PanelGrid = field(default_factory=PanelGrid)
    optional: dict[tuple[str, str], str] = field(default_factory=dict)  # (panel title, refId) -> why it may be empty

    def row(self, title: str, collapsed: bool = False) -> None:
        """Start a row that the following panels belong to."""
        self.layout.wrap()
        position = self.layout.place(WIDTH, 1)
        self.layout.wrap()
        self.panels.append(
            {
                "id": len(self.panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": collapsed,
                "gridPos": position,
                "panels": [],
            }
        )

    def add(self, panel: Json, width: int, height: int) -> None:
        """Put ``panel`` at the next free place."""
        self.optional |= {(panel["title"], ref): why for ref, why in panel.pop(_OPTIONAL, {}).items()}
        head = {"id": len(self.panels) + 1, "gridPos": self.layout.place(width, height), "datasource": DATASOURCE}
        self.panels.append({**head, **panel})

    def model(self, uid: str, site: DashboardContext) -> Json:
        """The whole dashboard as Grafana's JSON."""
        return {
            "uid": uid,
            "id": None,
            "title": self.title,
            "description": self.description,
            "tags": list(self.tags),
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
            "annotations": {"list": [_firing_alerts(), *([_restarts()] if self.gpus else [])]},
            "links": [
                _other_dashboards(),
                *(_link(link["title"], link["url"]) for link in site.runbook_links("Runbooks", "README")),
            ],
            "templating": {"list": variables(self.source, self.gpus)},
            "panels": self.panels,
        }


# --- variables, links, annotations ---------------------------------------------------------------------------


VARIABLES: Final = ("datasource", "cluster", "namespace", "model", "pod", "gpu")


def variables(engines: str, gpus: bool) -> list[Json]:
    """Data source, then cluster, namespace, model, pod and GPU, each filtered by those before it."""
    where = ('cluster=~"$cluster"', 'namespace=~"$namespace"', 'model_name=~"$model"', 'pod=~"$pod"')
    chain = (
        ("cluster", "Cluster", engines, "cluster", 0),
        ("namespace", "Namespace", engines, "namespace", 1),
        ("model", "Model", engines, "model_name", 2),
        ("pod", "Pod", engines, "pod", 3),
        *((("gpu", "GPU", "kvpressure_engine_gpu_info", "uuid", 4),) if gpus else ()),
    )
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
    return [
        source,
        *(_query_variable(name, label, metric, value, where[:depth]) for name, label, metric, value, depth in chain),
    ]


def _query_variable(name: str, label: str, metric: str, value: str, where: Sequence[str]) -> Json:
    selector = metric + ("{" + ",".join(where) + "}" if where else "")
    query = f"label_values({selector}, {value})"
    # .* and not .+ for All: a series without a cluster (or, for a static target, a pod) label has to match too.
    return {
        "name": name,
        "label": label,
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


def _firing_alerts() -> Json:
    return {
        "name": "Firing alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": RED,
        "expr": 'ALERTS{alertstate="firing",kvpressure_family=~".+",severity!~"info|none",cluster=~"$cluster|",'
        'namespace=~"$namespace|",model_name=~"$model|",pod=~"$pod|"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{severity}} {{namespace}} {{pod}}",
        "step": "60s",
        "useValueForTime": False,
    }


def _restarts() -> Json:
    return {
        "name": "Restarts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": BLUE,
        "expr": f"changes(kvpressure_container_restarts_total{{{CONTAINER}}}[2m]) > 0",
        "titleFormat": "container restarted",
        "textFormat": "{{namespace}} {{pod}} {{container}}",
        "step": "60s",
        "useValueForTime": False,
    }


def drill(uid: str, title: str, **variables: str) -> Json:
    """A link of a table column to another dashboard, with the same time range and variables; some come from the row."""
    kept = [name for name in VARIABLES if name not in variables]
    chosen = [f"${{{name}:queryparam}}" for name in kept] + [f"var-{name}={value}" for name, value in variables.items()]
    return {"title": title, "url": f"/d/{uid}?{'&'.join(chosen)}&${{__url_time_range}}", "targetBlank": False}


def _other_dashboards() -> Json:
    return {
        "title": "kvpressure dashboards",
        "type": "dashboards",
        "tags": ["kvpressure"],
        "asDropdown": True,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


def _link(title: str, url: str) -> Json:
    return {
        "title": title,
        "type": "link",
        "url": url,
        "icon": "doc",
        "tags": [],
        "asDropdown": False,
        "includeVars": False,
        "keepTime": False,
        "targetBlank": True,
        "tooltip": "",
    }


# --- thresholds and mappings -----------------------------------------------------------------------------------


def steps(site: DashboardContext, *marks: tuple[str, str | int], base: str = GREEN) -> Json:
    """Colour bands: ``base``, then (colour, name of a threshold or a number) from each upwards."""
    bands: list[Json] = [{"color": base, "value": None}]
    bands += [
        {"color": color, "value": site.thresholds[mark] if isinstance(mark, str) else float(mark)}
        for color, mark in marks
    ]
    return {"mode": "absolute", "steps": bands}


def neutral(color: str = BLUE) -> Json:
    """One colour for every value."""
    return {"mode": "absolute", "steps": [{"color": color, "value": None}]}


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


# --- panels ------------------------------------------------------------------------------------------------------


_OPTIONAL: Final = "optional queries"  # carried from a panel to its dashboard, which takes it out


def _panel(
    site: DashboardContext,
    kind: str,
    title: str,
    about: str,
    queries: Sequence[PanelQuery],
    alert: str | None,
    defaults: Json,
    options: Json,
    overrides: Sequence[Json] = (),
) -> Json:
    links: list[Json] = []
    if alert is not None and alert in site.alerts:
        about = f"{about}\n\nThe alert on these values is {alert}."
        links = site.runbook_links(f"Runbook {alert}", alert)
    optional = {query.model(index)["refId"]: query.optional for index, query in enumerate(queries) if query.optional}
    reasons = dict.fromkeys(optional.values())
    whole = len(reasons) == 1 and len(optional) == len(queries)
    for why in reasons:
        either = why.replace(", or ", ", or if ")  # the reason alone, without "if", is the text of an empty panel
        parts = " and ".join(dict.fromkeys(query.part for query in queries if query.optional == why))
        verb = "are" if " and " in parts or "curves" in parts else "is"
        about = f"{about}\n\n{'Empty' if whole else f'{parts} {verb} empty'} if {either}."
    if len(optional) == len(queries) and kind != "stat":  # a tile has no room for a sentence
        defaults["noValue"] = next(iter(optional.values()))
    return {
        "type": kind,
        "title": title,
        "description": about,
        "links": links,
        _OPTIONAL: optional,
        "targets": [query.model(index) for index, query in enumerate(queries)],
        "fieldConfig": {"defaults": defaults, "overrides": list(overrides)},
        "options": options,
    }


def _defaults(unit: str, thresholds: Json, mappings: Sequence[Json] = (), **more: Any) -> Json:
    return {"unit": unit, "thresholds": thresholds, "mappings": [*mappings, *NO_TRAFFIC], "noValue": "no data", **more}


def stat(
    site: DashboardContext,
    title: str,
    about: str,
    expr: str,
    unit: str,
    thresholds: Json,
    alert: str | None = None,
    optional: str = "",
) -> Json:
    """A tile with one number for the selection, and its history."""
    return _stat(site, title, about, PanelQuery(expr, optional=optional), unit, thresholds, alert, "value", "area")


def extreme(
    site: DashboardContext,
    title: str,
    about: str,
    expr: str,
    unit: str,
    thresholds: Json,
    alert: str | None = None,
    optional: str = "",
    legend: str = "{{pod}}",
    pick: str = "topk",
) -> Json:
    """A tile with the largest (``pick`` bottomk: smallest) current value of ``expr``, named by ``legend``."""
    return _stat(
        site,
        title,
        about,
        PanelQuery(f"{pick}(1, {expr})", legend, optional=optional, now=True),
        unit,
        thresholds,
        alert,
        "value_and_name",
        "none",
    )


def _stat(
    site: DashboardContext,
    title: str,
    about: str,
    query: PanelQuery,
    unit: str,
    thresholds: Json,
    alert: str | None,
    text: str,
    graph: str,
) -> Json:
    options = {
        "colorMode": "background",
        "graphMode": graph,
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": text,
        "wideLayout": True,
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return _panel(
        site, "stat", title, about, [query], alert, _defaults(unit, thresholds, color={"mode": "thresholds"}), options
    )


def timeseries(
    site: DashboardContext,
    title: str,
    about: str,
    queries: Sequence[PanelQuery],
    unit: str,
    thresholds: Json | None = None,
    alert: str | None = None,
    top: float | None = None,
    overrides: Sequence[Json] = (),
    small: bool = False,
) -> Json:
    """Lines over time; given thresholds are dashed lines. A ``small`` graph has a legend without numbers."""
    custom = {
        "drawStyle": "line",
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "fillOpacity": 8,
        "showPoints": "never",
        "spanNulls": False,
        "thresholdsStyle": {"mode": "dashed" if thresholds else "off"},
    }
    bounds: Json = {"min": 0} if top is None else {"min": 0, "max": top}
    defaults = _defaults(unit, thresholds or neutral(), custom=custom, color={"mode": "palette-classic"}, **bounds)
    options = {
        "legend": {
            "displayMode": "list" if small else "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": [] if small else ["lastNotNull", "max"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel(site, "timeseries", title, about, queries, alert, defaults, options, overrides)


def states(
    site: DashboardContext,
    title: str,
    about: str,
    queries: Sequence[PanelQuery],
    mappings: Sequence[Json],
    overrides: Sequence[Json] = (),
    alert: str | None = None,
    shown: str = "never",
) -> Json:
    """A state timeline: one bar per series while it exists; ``shown`` auto writes the state into it."""
    defaults = _defaults(
        "none", neutral(), mappings, color={"mode": "thresholds"}, custom={"fillOpacity": 80, "lineWidth": 0}
    )
    options = {
        "alignValue": "left",
        "mergeValues": True,
        "rowHeight": 0.9,
        "showValue": shown,
        "perPage": 20,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return _panel(site, "state-timeline", title, about, queries, alert, defaults, options, overrides)


def table(
    site: DashboardContext,
    title: str,
    about: str,
    queries: Sequence[PanelQuery],
    columns: Mapping[str, str],
    overrides: Sequence[Json] = (),
    sort: str = "",
    alert: str | None = None,
    order: str = "",
) -> Json:
    """A paged table of current values; queries are merged on their common labels. ``columns``: field -> heading, in
    this order; other fields are hidden. ``sort``: heading of the column sorted by largest value; ``order``: field
    sorted by smallest. Unknown values are a dash.
    """
    defaults = {
        "unit": "none",
        "thresholds": neutral(),
        "mappings": [],
        "noValue": "-",
        "custom": {
            "align": "left",
            "minWidth": 50,
            "cellOptions": {"type": "auto"},
            "filterable": False,
            "inspect": False,
        },
    }
    options = {
        "showHeader": True,
        "cellHeight": "sm",
        "footer": {"show": False, "reducer": ["sum"], "countRows": False, "fields": "", "enablePagination": True},
        "sortBy": [{"displayName": sort, "desc": True}] if sort else [],
    }
    values = [columns.get(f"Value #{query.model(index)['refId']}", "") for index, query in enumerate(queries)]
    queries = [
        replace(query, part=query.part or f'Column "{value}"') for query, value in zip(queries, values, strict=True)
    ]
    # The reason why a table may be empty is its default; it must not stand in an empty cell.
    cells = [matching(".*", ("noValue", defaults["noValue"])), *overrides]
    panel = _panel(site, "table", title, about, queries, alert, defaults, options, cells)
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        *([{"id": "sortBy", "options": {"fields": {}, "sort": [{"field": order, "desc": False}]}}] if order else []),
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
    return panel


def heatmap(
    site: DashboardContext, title: str, about: str, query: PanelQuery, unit: str, alert: str | None = None
) -> Json:
    """Cumulative buckets over time, darker for more; one colour of varying lightness, so it needs no colour vision."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "exemplars": {"color": RED},
        "color": {
            "mode": "scheme",
            "scheme": "Viridis",
            "steps": 64,
            "reverse": False,
            "exponent": 0.5,
            "fill": BLUE,
            "scale": "exponential",
        },
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
    }
    defaults = _defaults(
        unit,
        neutral(),
        custom={"hideFrom": {"legend": False, "tooltip": False, "viz": False}, "scaleDistribution": {"type": "linear"}},
    )
    return _panel(site, "heatmap", title, about, [query], alert, defaults, options)


def column(name: str, *properties: tuple[str, Any]) -> Json:
    """Override for one column or series, by its displayed name."""
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties],
    }


def matching(pattern: str, *properties: tuple[str, Any]) -> Json:
    """Override for all series whose displayed name matches ``pattern``."""
    return {
        "matcher": {"id": "byRegexp", "options": pattern},
        "properties": [{"id": key, "value": value} for key, value in properties],
    }


def dashed(pattern: str) -> Json:
    """Override that dashes matching lines, so that two kinds are distinguishable without colour."""
    return matching(pattern, ("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}), ("custom.fillOpacity", 0))


MEDIAN_DASHED: Final = dashed("/ p50$/")
