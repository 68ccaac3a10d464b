/* Draws one board with Grafana's own field, transformation and panel code. Not a Grafana: state timelines and heat maps have no
   published component and are drawn here, and variables are all chosen. Writes a report of what went wrong into the page. */
import 'uplot/dist/uPlot.min.css';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { lastValueFrom } from 'rxjs';
import { createTheme, ThemeContext, applyFieldOverrides, FieldType, toDataFrame, transformDataFrame, FieldConfigOptionsRegistry,
  standardFieldConfigEditorRegistry, standardTransformersRegistry, standardTransformers, reduceField, cacheFieldDisplayNames,
  getFieldDisplayName, getMinMaxAndDelta, renderLegendFormat, identityOverrideProcessor, numberOverrideProcessor, stringOverrideProcessor,
  unitOverrideProcessor, thresholdsOverrideProcessor, valueMappingsOverrideProcessor, dateTime } from '@grafana/data';
import { TimeSeries, BigValue, PanelChrome, GlobalStyles } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';

const parameters = new URLSearchParams(location.search);
const SECONDS = Number(parameters.get('seconds') || 60);
const STEP = Math.max(1, Math.ceil(SECONDS / 300));
const END = Math.floor(Date.now() / 1000);
const START = END - SECONDS;
const WIDTH = Number(parameters.get('width') || 1880);
const COLUMN = WIDTH / 24;
const ROW = 36;
const report = { queries: 0, errors: [], empty: [], react: [] };
const theme = createTheme({ colors: { mode: parameters.get('theme') || 'dark' } });
const timeRange = { from: dateTime(START * 1000), to: dateTime(END * 1000), raw: { from: dateTime(START * 1000), to: dateTime(END * 1000) } };

/* Grafana fills these registries in its app; nothing does it for a library user. */
const entry = (id, path, process) => ({ id, path, name: id, process, editor: () => null, override: () => null,
  shouldApply: () => true, settings: {} });
const standard = [entry('unit', 'unit', unitOverrideProcessor), entry('min', 'min', numberOverrideProcessor),
  entry('max', 'max', numberOverrideProcessor), entry('decimals', 'decimals', numberOverrideProcessor),
  entry('displayName', 'displayName', stringOverrideProcessor), entry('noValue', 'noValue', stringOverrideProcessor),
  entry('thresholds', 'thresholds', thresholdsOverrideProcessor), entry('mappings', 'mappings', valueMappingsOverrideProcessor),
  entry('color', 'color', identityOverrideProcessor), entry('links', 'links', identityOverrideProcessor)];
standardFieldConfigEditorRegistry.setInit(() => standard);
const custom = ['thresholdsStyle', 'hideFrom', 'drawStyle', 'lineWidth', 'lineInterpolation', 'fillOpacity', 'showPoints', 'spanNulls',
  'width', 'minWidth', 'align', 'cellOptions', 'filterable', 'inspect'].map((name) => ({ ...entry(`custom.${name}`, name, identityOverrideProcessor), isCustom: true }));
const registry = new FieldConfigOptionsRegistry(() => [...standard, ...custom]);
standardTransformersRegistry.setInit(() => [...new Map(Object.values(standardTransformers).map((one) => [one.id, one])).values()]
  .map((one) => ({ id: one.id, name: one.id, transformation: async () => one, editor: () => null })));

const expand = (expr) => expr.replaceAll('$__rate_interval', '15s').replace(/\$\w+/g, '.*');

async function query(panel, target) {
  report.queries += 1;
  const asked = target.format === 'table' ? { query: expand(target.expr), time: END }
    : { query: expand(target.expr), start: START, end: END, step: STEP };
  const answer = await fetch(`/api/v1/query${target.format === 'table' ? '' : '_range'}?${new URLSearchParams(asked)}`);
  const body = await answer.json();
  if (body.status !== 'success') {
    report.errors.push({ panel: panel.title, expr: asked.query, error: body.error });
    return [];
  }
  return body.data.result;
}

const grid = Array.from({ length: Math.floor((END - START) / STEP) + 1 }, (_, i) => START + i * STEP);

function seriesFrame(target, one) {
  const at = new Map(one.values.map(([time, value]) => [Math.round(time), Number(value)]));
  const name = target.legendFormat ? renderLegendFormat(target.legendFormat, one.metric) : JSON.stringify(one.metric);
  return toDataFrame({ refId: target.refId, fields: [
    { name: 'Time', type: FieldType.time, values: grid.map((time) => time * 1000) },
    { name: 'Value', type: FieldType.number, labels: one.metric, config: { displayNameFromDS: name },
      values: grid.map((time) => at.get(time) ?? null) }] });
}

function tableFrame(target, rows, single) {
  const labels = [...new Set(rows.flatMap((row) => Object.keys(row.metric)))].filter((name) => name !== '__name__');
  return toDataFrame({ refId: target.refId, fields: [
    { name: 'Time', type: FieldType.time, values: rows.map(() => END * 1000) },
    ...labels.map((name) => ({ name, type: FieldType.string, values: rows.map((row) => row.metric[name] ?? '') })),
    { name: single ? 'Value' : `Value #${target.refId}`, type: FieldType.number, values: rows.map((row) => Number(row.value[1])) }] });
}

async function load(panel) {
  let frames = [];
  for (const target of panel.targets) {
    const rows = await query(panel, target);
    if (rows.length === 0) { report.empty.push({ panel: panel.title, refId: target.refId }); }
    if (target.format === 'table') {
      if (rows.length) { frames.push(tableFrame(target, rows, panel.targets.length === 1)); }
    } else {
      frames.push(...rows.map((row) => seriesFrame(target, row)));
    }
  }
  if (panel.transformations && frames.length) { frames = await lastValueFrom(transformDataFrame(panel.transformations, frames)); }
  const data = applyFieldOverrides({ data: frames, fieldConfig: panel.fieldConfig, replaceVariables: (text) => text, theme, timeZone: 'utc',
    fieldConfigRegistry: registry });
  cacheFieldDisplayNames(data);
  return data;
}

const fixed = (field) => theme.visualization.getColorByName(field.config.color?.fixedColor ?? 'text');
const quiet = theme.colors.text.secondary;

function Stat({ panel, data, width, height }) {
  const field = data[0]?.fields.find((one) => one.type === FieldType.number);
  if (!field) { return <div style={{ padding: 8, fontSize: 22, color: quiet }}>{panel.fieldConfig.defaults.noValue}</div>; }
  const value = reduceField({ field, reducers: ['lastNotNull'] }).lastNotNull;
  const sparkline = { y: { ...field, state: { range: getMinMaxAndDelta(field) } }, x: data[0].fields[0] };
  return <BigValue value={field.display(value)} width={width} height={height} theme={theme} colorMode={panel.options.colorMode}
    graphMode={panel.options.graphMode} sparkline={sparkline} justifyMode="auto" textMode="value" />;
}

function States({ data, width, height }) {
  const rows = data.slice(0, 14);
  const line = Math.min(26, (height - 18) / Math.max(1, rows.length));
  const left = 190;
  const cell = (width - left - 8) / grid.length;
  return <svg width={width} height={height}>{rows.map((frame, row) => {
    const field = frame.fields[1];
    return <g key={row}>
      <text x={4} y={row * line + line * 0.65} fill={quiet} fontSize={11}>{getFieldDisplayName(field, frame, data).slice(0, 32)}</text>
      {[...field.values].map((value, i) => (value === null ? null : <rect key={i} x={left + i * cell} y={row * line + 2} width={cell + 0.5} height={line - 4}
        fill={field.config.color?.mode === 'fixed' ? fixed(field) : field.display(value).color} />))}</g>;
  })}</svg>;
}

const VIRIDIS = ['#440154', '#46327e', '#365c8d', '#277f8e', '#1fa187', '#4ac16d', '#a0da39', '#fde725'];

function Heatmap({ data, width, height }) {
  const rows = data.map((frame) => ({ le: Number(frame.fields[1].labels.le.replace('+Inf', 'Infinity')), values: [...frame.fields[1].values] }))
    .sort((a, b) => a.le - b.le).map((row, i, all) => ({ le: row.le, values: row.values.map((v, t) => (v ?? 0) - (i ? all[i - 1].values[t] ?? 0 : 0)) }));
  const top = Math.max(1e-9, ...rows.flatMap((row) => row.values));
  const line = (height - 6) / Math.max(1, rows.length);
  const cell = (width - 56) / grid.length;
  return <svg width={width} height={height}>{rows.map((row, i) => <g key={i}>
    <text x={2} y={height - 6 - i * line} fill={quiet} fontSize={10}>{String(row.le)}</text>
    {row.values.map((value, t) => (value > 0 ? <rect key={t} x={50 + t * cell} y={height - 3 - (i + 1) * line} width={cell + 0.5} height={line}
      fill={VIRIDIS[Math.min(7, Math.floor(8 * Math.sqrt(value / top)))]} /> : null))}</g>)}</svg>;
}

function Content({ panel, data, width, height }) {
  if (panel.type === 'stat') { return <Stat {...{ panel, data, width, height }} />; }
  if (!data.length) { return <div style={{ padding: 8, color: quiet }}>{panel.fieldConfig.defaults.noValue}</div>; }
  if (panel.type === 'table') { return <TableNG data={data[0]} width={width} height={height} fieldConfig={panel.fieldConfig} structureRev={1} initialSortBy={panel.options.sortBy} />; }
  if (panel.type === 'state-timeline') { return <States {...{ data, width, height }} />; }
  if (panel.type === 'heatmap') { return <Heatmap {...{ data, width, height }} />; }
  return <TimeSeries frames={data} timeRange={timeRange} timeZone="utc" width={width} height={height} options={panel.options}
    legend={{ ...panel.options.legend, displayMode: 'list', calcs: [] }}>{() => null}</TimeSeries>;
}

class Guard extends React.Component {
  state = { failed: false };
  static getDerivedStateFromError() { return { failed: true }; }
  componentDidCatch(error) { report.react.push({ panel: this.props.title, error: String(error) }); }
  render() { return this.state.failed ? <b>failed</b> : this.props.children; }
}

function Board({ board, loaded }) {
  return <ThemeContext.Provider value={theme}><GlobalStyles />
    <div style={{ position: 'relative', width: WIDTH, background: theme.colors.background.canvas }}>
      <h1 style={{ padding: '8px 8px 0', fontSize: 20, height: 40 }}>{board.title}</h1>
      {board.panels.map((panel) => {
        const { x, y, w, h } = panel.gridPos;
        const at = { position: 'absolute', left: x * COLUMN + 3, top: 44 + y * ROW, width: w * COLUMN - 6, height: h * ROW - 6 };
        if (panel.type === 'row') { return <h4 key={panel.id} style={{ ...at, paddingTop: 6 }}>{panel.title}</h4>; }
        return <div key={panel.id} style={at}><PanelChrome title={panel.title} width={at.width} height={at.height} padding="none">
          {(width, height) => <Guard title={panel.title}><Content {...{ panel, width, height }} data={loaded.get(panel.id)} /></Guard>}
        </PanelChrome></div>;
      })}
    </div></ThemeContext.Provider>;
}

window.addEventListener('error', (event) => report.react.push({ panel: '', error: `${event.message} ${String(event.error?.stack).split('\n').slice(1, 4).join(' ')}` }));
const board = await (await fetch(`/boards/${parameters.get('board')}.json`)).json();
const loaded = new Map();
for (const panel of board.panels) {
  if (panel.type !== 'row') { loaded.set(panel.id, await load(panel)); }
}
createRoot(document.getElementById('root')).render(<Board board={board} loaded={loaded} />);
setTimeout(() => {
  const script = Object.assign(document.createElement('script'), { type: 'application/json', id: 'report' });
  report.canvases = document.querySelectorAll('canvas').length;
  script.textContent = JSON.stringify(report).replaceAll('<', '\\u003c');
  document.body.append(script);
}, 2500);
