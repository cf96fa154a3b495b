// Draws one dashboard with Grafana's own front-end packages: panels, units, thresholds, legends and themes.
// Only the queries, the two small wrappers of plots and tiles, and the rows' titles are written here.
//
//   ?dash=now.json&prom=http://HOST:PORT&end=SECONDS&secs=SECONDS
import './boot.js';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { MemoryRouter } from 'react-router-dom';
import {
  createTheme, dateTime, displayNameOverrideProcessor, EventBusSrv, FieldColorModeId, FieldType,
  getFieldDisplayValues, identityOverrideProcessor, LoadingState, numberOverrideProcessor, PanelPlugin,
  standardEditorsRegistry, standardFieldConfigEditorRegistry, ThemeContext, thresholdsOverrideProcessor,
  toDataFrame, unitOverrideProcessor, valueMappingsOverrideProcessor,
} from '@grafana/data';
import { config, setAppEvents, setPluginImportUtils, setTemplateSrv } from '@grafana/runtime';
import { BigValue, GlobalStyles, PortalContainer, TimeSeries } from '@grafana/ui';
import {
  EmbeddedScene, SceneDataNode, SceneGridItem, SceneGridLayout, SceneTimeRange, VizPanel,
} from '@grafana/scenes';

const asked = new URLSearchParams(location.search);
const prometheus = asked.get('prom');
const secs = +asked.get('secs');
const end = +asked.get('end');
const start = end - secs;
const timeRange = { from: dateTime(start * 1000), to: dateTime(end * 1000), raw: { from: 'now-30m', to: 'now' } };
const theme = createTheme({ colors: { mode: 'light' } });
config.theme2 = theme;
setAppEvents(new EventBusSrv());
setTemplateSrv({ getVariables: () => [], replace: (s) => s, containsTemplate: () => false, updateTimeRange() {} });

// Without these registries no unit, threshold, color or mapping of a panel's JSON applies.
const nothing = () => null;
standardEditorsRegistry.setInit(() =>
  ['number', 'text', 'boolean', 'select', 'radio', 'unit', 'color', 'thresholds', 'mappings', 'links', 'strings',
    'stats-picker', 'field-name', 'multi-select', 'slider', 'timezone'].map((id) => ({ id, name: id, editor: nothing })));
const PROCESSES = [
  ['unit', unitOverrideProcessor], ['min', numberOverrideProcessor], ['max', numberOverrideProcessor],
  ['decimals', numberOverrideProcessor], ['displayName', displayNameOverrideProcessor],
  ['color', identityOverrideProcessor], ['noValue', identityOverrideProcessor], ['links', identityOverrideProcessor],
  ['thresholds', thresholdsOverrideProcessor], ['mappings', valueMappingsOverrideProcessor],
  ['fieldMinMax', identityOverrideProcessor], ['filterable', identityOverrideProcessor],
];
const STEPS = { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] };
standardFieldConfigEditorRegistry.setInit(() => PROCESSES.map(([id, process]) => ({
  id, path: id, name: id, editor: nothing, override: nothing, process, shouldApply: () => true, settings: {},
  defaultValue: id === 'mappings' ? [] : id === 'thresholds' ? STEPS : undefined, category: ['Standard options'],
})));

function Plot({ data, width, height, options, timeZone }) {
  if (!data.series.length) {
    return <div style={{ textAlign: 'center', color: '#999' }}>No data</div>;
  }
  const { series: frames, structureRev, timeRange: range } = data;
  return <TimeSeries {...{ frames, structureRev, timeRange: range, timeZone, width, height, options }} legend={options.legend}>
    {nothing}
  </TimeSeries>;
}

function Tile({ data, width, height, options, fieldConfig, timeZone }) {
  const values = getFieldDisplayValues({
    fieldConfig, reduceOptions: options.reduceOptions, replaceVariables: (s) => s, theme, data: data.series, timeZone,
  });
  const one = width / values.length - 4;
  return <div style={{ display: 'flex', gap: 4 }}>{values.map(({ display }, key) =>
    <BigValue {...{ key, height, theme }} value={display} width={one} text={options.text} colorMode={options.colorMode}
      graphMode="none" justifyMode={options.justifyMode} textMode={options.textMode} wideLayout={options.wideLayout} />)}
  </div>;
}

const CUSTOM = {
  drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0, gradientMode: 'none',
  showPoints: 'auto', pointSize: 5, spanNulls: false, barAlignment: 0, axisPlacement: 'auto', axisLabel: '',
  axisColorMode: 'text', axisBorderShow: false, axisCenteredZero: false, stacking: { mode: 'none', group: 'A' },
  thresholdsStyle: { mode: 'off' }, hideFrom: { legend: false, tooltip: false, viz: false },
  scaleDistribution: { type: 'linear' }, insertNulls: false,
};
const byColor = { settings: { byValueSupport: true, bySeriesSupport: true }, defaultValue: { mode: FieldColorModeId.PaletteClassic } };
const plugins = {
  timeseries: new PanelPlugin(Plot).useFieldConfig({
    standardOptions: { color: byColor },
    useCustomConfig: (builder) => Object.entries(CUSTOM).forEach(([id, defaultValue]) => builder.addCustomEditor({
      id, path: id, name: id, defaultValue, editor: nothing, override: nothing, process: (x) => x, shouldApply: () => true,
    })),
  }),
  stat: new PanelPlugin(Tile).useFieldConfig(),
  text: new PanelPlugin(({ options }) => <div style={{ whiteSpace: 'pre-wrap' }}>{options.content}</div>),
};
for (const [id, plugin] of Object.entries(plugins)) {
  const info = { version: '13', logos: {}, links: [], screenshots: [], updated: '', author: { name: '' }, description: '' };
  plugin.meta = { id, name: id, info, module: '', baseUrl: '', type: 'panel', sort: 0 };
}
setPluginImportUtils({ importPanelPlugin: async (id) => plugins[id], getPanelPluginFromCache: (id) => plugins[id] });

async function ask(path, values) {
  const answer = await (await fetch(`${prometheus}/api/v1/${path}?${new URLSearchParams(values)}`)).json();
  if (answer.status !== 'success') {
    throw new Error(`${values.query}: ${answer.error}`);
  }
  return answer.data.result;
}

async function framesOf(target) {
  const query = target.expr.replaceAll('$__rate_interval', '15s').replaceAll('$pool', '.*').replaceAll('$worker', '.*');
  const step = Math.max(5, Math.ceil(secs / 400 / 5) * 5);
  const first = Math.floor(start / step) * step;
  const found = target.instant
    ? (await ask('query', { query, time: end })).map((series) => ({ ...series, values: [series.value] }))
    : await ask('query_range', { query, start: first, end, step });
  return found.map(({ metric, values }) => {
    const name = target.legendFormat.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => metric[label] ?? '');
    const at = new Map(values.map(([time, value]) => [time, +value]));
    const times = target.instant ? [...at.keys()] : Array.from({ length: (end - first) / step + 1 }, (_, i) => first + i * step);
    const numbers = times.map((time) => (Number.isFinite(at.get(time)) ? at.get(time) : null)); // keeps gaps
    return toDataFrame({
      refId: target.refId, name,
      fields: [
        { name: 'Time', type: FieldType.time, values: times.map((time) => time * 1000), config: { interval: step * 1000 } },
        { name: 'Value', type: FieldType.number, values: numbers, labels: metric, config: { displayNameFromDS: name } },
      ],
    });
  });
}

async function itemOf(panel) {
  const { x, y, w: width, h: height } = panel.gridPos;
  const { title, description, fieldConfig, options = {} } = panel;
  const pluginId = panel.type === 'row' ? 'text' : panel.type;
  const series = (await Promise.all((panel.targets ?? []).map(framesOf))).flat();
  const $data = new SceneDataNode({ data: { state: LoadingState.Done, series, timeRange, structureRev: 1 } });
  return new SceneGridItem({ x, y, width, height, body: new VizPanel({ title, description, pluginId, fieldConfig, options, $data }) });
}

async function draw() {
  const board = await (await fetch(asked.get('dash'))).json();
  const children = await Promise.all(board.panels.map(itemOf));
  const [from, to] = [start, end].map((time) => new Date(time * 1000).toISOString());
  const scene = new EmbeddedScene({
    $timeRange: new SceneTimeRange({ from, to }), body: new SceneGridLayout({ children, isLazy: false }),
  });
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <MemoryRouter>
        <div style={{ minHeight: '100vh', background: theme.colors.background.canvas, padding: 8 }}>
          <h3 style={{ color: theme.colors.text.primary, margin: 4 }}>{board.title}</h3>
          <scene.Component model={scene} />
        </div>
        <PortalContainer />
      </MemoryRouter>
    </ThemeContext.Provider>);
}
draw().catch((error) => { document.body.innerText = error.stack; });
