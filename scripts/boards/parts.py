"""The parts of every dashboard: tiles, plots, text, rows, variables, links and annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, text, timeseries
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.text import TextMode

SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
SERVICES: Final = 'job=~"quire-(allocator|worker|gateway)"'
POOL: Final = 'pool=~"$pool"'
WORKER: Final = 'instance=~"$worker"'
RATE: Final = "[$__rate_interval]"
COLUMNS: Final = 24
TILE_HEIGHT: Final = 4
PLOT_HEIGHT: Final = 8
VALUE_PIXELS: Final = 30  # size of a tile's text; words that replace a value fit into a tile of four columns
LEGEND_PIXELS: Final = 360  # width of the legend right of a plot; it has eight rows, and only three below the plot
IDLE: Final = -1.0  # value of a tile if the service reports but has nothing to measure
RED, ORANGE, GREEN, GRAY, BLUE = "red", "orange", "green", "#8e8e8e", "blue"

Query = tuple[str, str]  # PromQL, and the legend's name for its series


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard.

    Attributes:
        title: the panel's name, unique on its dashboard.
        says: one or two sentences about its content and meaning.
        unit: Grafana's name of the unit.
        queries: its queries to Prometheus.
        width: number of columns, of 24.
        runbook: the alert whose runbook says what to do.
    """

    title: str
    says: str
    unit: str
    queries: Sequence[Query]
    width: int = 12
    runbook: str = ""


@dataclass(frozen=True, slots=True)
class Tile(Panel):
    """A current number. The tile is red and shows `absent` when no service reports it.

    Attributes:
        steps: (value, color) pairs: the color applies from the value on. Below the first value, the tile is red.
        absent: the text without any series.
        words: texts that replace values, with their colors.
        shows_names: whether each of several values shows its legend.
    """

    steps: Sequence[tuple[float, str]] = ((0.0, GREEN),)
    absent: str = "no reports"
    words: dict[float, tuple[str, str]] = field(default_factory=dict)
    shows_names: bool = False


def faults(title: str, says: str, query: str, *, absent: str, width: int = 4, runbook: str = "") -> Tile:
    """Returns a tile that counts faults: green at 0, red from 1 on."""
    steps = ((0, GREEN), (1, RED))
    return Tile(title, says, "short", [(query, "")], width=width, runbook=runbook, steps=steps, absent=absent)


@dataclass(frozen=True, slots=True)
class Plot(Panel):
    """Series over time, with a table of last and largest values as the legend.

    Attributes:
        is_stacked: whether series are stacked as parts of one whole.
        largest: upper end of the axis, or None.
        limits: values at which a colored line is drawn as a warning.
        is_logarithmic: whether the axis is logarithmic, for plots with one series far above the others.
    """

    is_stacked: bool = False
    largest: float | None = None
    limits: Sequence[tuple[float, str]] = ()
    is_logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A text in Markdown."""

    title: str
    content: str
    width: int = 24
    height: int = 16


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: Sequence[Panel | Note]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard.

    Attributes:
        name: stem of the file; the uid is `quire-` followed by this.
        title: the name in Grafana's list.
        says: the question that it answers.
        rows: the rows, from top to bottom.
    """

    name: str
    title: str
    says: str
    rows: Sequence[Row]


def quantiles(metric: str, by: str, legend: str, chosen: str, levels: Sequence[float] = (0.5, 0.99)) -> list[Query]:
    """Returns queries for quantiles of a histogram, with one series per value of the label `by`."""
    return [
        (
            f"histogram_quantile({level}, sum by (le, {by}) (rate({metric}_bucket{{{chosen}}}{RATE}))) >= 0",
            f"{legend} p{level * 100:g}",
        )
        for level in levels
    ]


def ratio(part: str, whole: str) -> str:
    """Returns a query for a quotient. The quotient has no value, instead of NaN, where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def reported(query: str, reporting: str) -> str:
    """Returns a query that has a value only while `reporting` has one. A rate alone would have a value until its range
    has passed since the end of the process."""
    return f"({query}) and on () {reporting}"


def or_idle(query: str, reporting: str) -> str:
    """Returns a query that gives `IDLE` where `reporting` has series and the query has none."""
    return f"({reported(query, reporting)}) or ({IDLE:g} * (count({reporting}) > bool 0))"


def _target(number: int, query: Query, *, is_instant: bool) -> prometheus.Dataquery:
    expression, legend = query
    target = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
    target = target.datasource(SOURCE)
    return target.instant() if is_instant else target.range()


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in steps])
    )


def _words(words: dict[float, tuple[str, str]]) -> list[models.ValueMap]:
    options = {
        f"{value:g}": models.ValueMappingResult(text=shown, color=color, index=index)
        for index, (value, (shown, color)) in enumerate(words.items())
    }
    return [models.ValueMap(options=options)] if options else []


def _tile(tile: Tile) -> stat.Panel:
    mode = kinds.BigValueTextMode.VALUE_AND_NAME if tile.shows_names else kinds.BigValueTextMode.VALUE
    return (
        stat.Panel()
        .no_value(tile.absent)
        .thresholds(_thresholds([(None, RED), *tile.steps]))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .mappings(_words(tile.words))
        .color_mode(kinds.BigValueColorMode.BACKGROUND)
        .graph_mode(kinds.BigValueGraphMode.NONE)
        .text_mode(mode)
        .text(common.VizTextDisplayOptions().value_size(VALUE_PIXELS))
        .reduce_options(common.ReduceDataOptions().calcs(["last"]))
    )


def _plot(plot: Plot) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(kinds.LegendDisplayMode.TABLE)
        .placement(kinds.LegendPlacement.RIGHT)
        .width(LEGEND_PIXELS if plot.width >= COLUMNS // 2 else LEGEND_PIXELS // 2)
        .show_legend(True)
        .calcs(["last", "max"])
        .sort_by("Max")
        .sort_desc(True)
    )
    panel = (
        timeseries.Panel()
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .line_width(2 if not plot.is_stacked else 1)
        .fill_opacity(40 if plot.is_stacked else 0)
        .show_points(kinds.VisibilityMode.AUTO)
        .point_size(4)
        .span_nulls(False)
        .thresholds(_thresholds([(None, GREEN), *plot.limits]))
    )
    if plot.limits:
        style = kinds.GraphThresholdsStyleMode.DASHED
        panel = panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
    if plot.is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    if plot.is_logarithmic:
        scale = common.ScaleDistributionConfig().type(kinds.ScaleDistribution.SYMLOG).log(10).linear_threshold(1)
        panel = panel.scale_distribution(scale)
    if plot.largest is not None:
        panel = panel.max(plot.largest)
    return panel.min(0)


def _built(part: Panel | Note, number: int, place: models.GridPos) -> Any:
    if isinstance(part, Note):
        note = text.Panel().mode(TextMode.MARKDOWN).content(part.content)
        return note.id(number).title(part.title).grid_pos(place)
    if isinstance(part, Tile):
        panel: Any = _tile(part)
    else:
        assert isinstance(part, Plot)
        panel = _plot(part)
    panel = panel.id(number).title(part.title).description(part.says).unit(part.unit).datasource(SOURCE)
    for index, query in enumerate(part.queries):
        panel = panel.with_target(_target(index, query, is_instant=isinstance(part, Tile)))
    if part.runbook:
        link = dashboard.DashboardLink(f"What to do: {part.runbook}").type(models.DashboardLinkType.LINK)
        panel = panel.links([link.url("/d/quire-runbooks").keep_time(True)])
    return panel.grid_pos(place)


def _variable(name: str, label: str, says: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(says)
        .datasource(SOURCE)
        .query({"qryType": 1, "query": query, "refId": "variable"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


class _Annotation(dashboard.AnnotationQuery):
    """An annotation with a title and a step, which the Prometheus data source reads along with the query."""

    def __init__(self, name: str, color: str, expression: str, title: str) -> None:
        super().__init__()
        self.name(name).icon_color(color).expr(expression).datasource(SOURCE).enable(True).hide(False)
        self._title = title

    def build(self) -> Any:
        model = super().build()
        plain = model.to_json()
        model.to_json = lambda: plain | {"titleFormat": self._title, "step": "15s", "textFormat": "{{instance}}"}
        return model


def build(board: Board) -> models.Dashboard:
    """Returns a dashboard as Grafana's own model."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"quire-{board.name}")
        .description(board.says)
        .tags(["quire"])
        .timezone("browser")
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .link(
            dashboard.DashboardLink("Quire")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["quire"])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource")
            .label("Data source")
            .description("The Prometheus that scrapes the services.")
            .type("prometheus")
            .current(models.VariableOption(text="Prometheus", value="prometheus"))
        )
        .with_variable(
            _variable("pool", "Pool", "Pools of the allocator.", "label_values(quire_allocator_blocks, pool)")
        )
        .with_variable(
            _variable("worker", "Worker", "Workers, by scrape.", "label_values(quire_worker_kv_bytes, instance)")
        )
        .annotation(
            _Annotation("Starts", BLUE, f"(time() - process_start_time_seconds{{{SERVICES}}}) < 15", "{{job}} started")
        )
        .annotation(_Annotation("Silences", RED, f"up{{{SERVICES}}} == 0", "{{job}} does not answer"))
    )
    number, y = 1, 0
    for row in board.rows:
        place = models.GridPos(h=1, w=COLUMNS, x=0, y=y)
        built = built.with_row(dashboard.Row(row.title).id(number).grid_pos(place))
        number, y, x, height = number + 1, y + 1, 0, 0
        for part in row.panels:
            if x + part.width > COLUMNS:
                x, y, height = 0, y + height, 0
            high = part.height if isinstance(part, Note) else TILE_HEIGHT if isinstance(part, Tile) else PLOT_HEIGHT
            built = built.with_panel(_built(part, number, models.GridPos(h=high, w=part.width, x=x, y=y)))
            number, x, height = number + 1, x + part.width, max(height, high)
        y += height
    return built.build()
