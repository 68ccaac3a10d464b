/* Draws one dashboard with Grafana's own field, transformation and panel code. Not a Grafana: state timelines and heat maps have no
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
const END = Math.floor(Number(parameters.get('end')) || Date.now() / 1000);
const START = END - SECONDS;
const WIDTH = Number(parameters.get('width') || 1880);
/* Grafana's own measures: 24 columns between two paddings, rows of 30 with a gap of 8, and what stands above the panels. */
const PADDING = 16;
const COLUMN = (WIDTH - 2 * PADDING + 8) / 24;
const ROW = 38;
const HEADER = 130;
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
const custom = ['thresholdsStyle', 'hideFrom', 'drawStyle', 'lineWidth', 'lineStyle', 'axisPlacement', 'lineInterpolation', 'fillOpacity', 'showPoints', 'spanNulls',
  'width', 'minWidth', 'align', 'cellOptions', 'wrapText', 'stacking', 'filterable', 'inspect'].map((name) => ({ ...entry(`custom.${name}`, name, identityOverrideProcessor), isCustom: true }));
const registry = new FieldConfigOptionsRegistry(() => [...standard, ...custom]);
standardTransformersRegistry.setInit(() => [...new Map(Object.values(standardTransformers).map((one) => [one.id, one])).values()]
  .map((one) => ({ id: one.id, name: one.id, transformation: async () => one, editor: () => null })));

const expand = (expr) => expr.replaceAll('$__rate_interval', '15s').replace(/\$([a-z]\w*)/g, (_, name) => parameters.get(`var-${name}`) || '.*');

async function query(panel, target) {
  report.queries += 1;
  const asked = target.instant ? { query: expand(target.expr), time: END }
    : { query: expand(target.expr), start: START, end: END, step: STEP };
  const answer = await fetch(`/api/v1/query${target.instant ? '' : '_range'}?${new URLSearchParams(asked)}`);
  const body = await answer.json();
  if (body.status !== 'success') {
    report.errors.push({ panel: panel.title, expr: asked.query, error: body.error });
    return [];
  }
  return body.data.result;
}

const grid = Array.from({ length: Math.floor((END - START) / STEP) + 1 }, (_, i) => START + i * STEP);

function seriesFrame(target, one) {
  const name = target.legendFormat ? renderLegendFormat(target.legendFormat, one.metric) : JSON.stringify(one.metric);
  if (target.instant) {
    return toDataFrame({ refId: target.refId, fields: [{ name: 'Time', type: FieldType.time, values: [END * 1000] },
      { name: 'Value', type: FieldType.number, labels: one.metric, config: { displayNameFromDS: name }, values: [Number(one.value[1])] }] });
  }
  const at = new Map(one.values.map(([time, value]) => [Math.round(time), Number(value)]));
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
  const frame = data.find((one) => one.fields.some((field) => field.type === FieldType.number));
  const field = frame?.fields.find((one) => one.type === FieldType.number);
  if (!field) { return <div style={{ padding: 8, fontSize: 18, color: quiet }}>{panel.fieldConfig.defaults.noValue}</div>; }
  const value = reduceField({ field, reducers: ['lastNotNull'] }).lastNotNull;
  const sparkline = { y: { ...field, state: { range: getMinMaxAndDelta(field) } }, x: frame.fields[0] };
  const named = panel.options.textMode === 'value_and_name';
  return <BigValue value={{ ...field.display(value), title: named ? getFieldDisplayName(field, frame, data) : undefined }} width={width}
    height={height} theme={theme} colorMode={panel.options.colorMode} graphMode={panel.options.graphMode} justifyMode="auto"
    sparkline={panel.options.graphMode === 'none' ? undefined : sparkline} textMode={named ? 'value_and_name' : 'value'} />;
}

/* Stretches of the same shown state, as Grafana merges them. */
function stretches(field) {
  const found = [];
  [...field.values].forEach((value, t) => {
    const last = found.at(-1);
    if (last && last.value === value && last.end === t) { last.end = t + 1; } else if (value !== null) { found.push({ value, start: t, end: t + 1 }); }
  });
  return found;
}

function States({ panel, data, width, height }) {
  const rows = data.slice(0, panel.options.perPage);
  const names = rows.map((frame) => getFieldDisplayName(frame.fields[1], frame, data));
  const line = Math.min(30, (height - 20) / Math.max(1, rows.length));
  const left = Math.min(0.4 * width, 12 + 6.4 * Math.max(0, ...names.map((name) => name.length)));
  const cell = (width - left - 8) / grid.length;
  return <svg width={width} height={height}>{rows.map((frame, row) => {
    const field = frame.fields[1];
    return <g key={row}><text x={left - 6} y={4 + (row + 0.62) * line} fill={quiet} fontSize={11} textAnchor="end">{names[row]}</text>
      {stretches(field).map(({ value, start, end }) => {
        const shown = field.display(value);
        const color = field.config.color?.mode === 'fixed' ? fixed(field) : shown.color;
        const wide = (end - start) * cell > 7 * shown.text.length + 8;
        return <g key={start}><rect x={left + start * cell} y={4 + row * line} width={(end - start) * cell} height={0.88 * line} fill={color} />
          {panel.options.showValue !== 'never' && wide ? <text x={left + start * cell + 6} y={4 + (row + 0.62) * line} fontSize={11}
            fill={theme.colors.getContrastText(color)}>{shown.text}</text> : null}</g>;
      })}</g>;
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
  if (panel.type === 'table') { return <TableNG data={data[0]} width={width} height={height} fieldConfig={panel.fieldConfig} structureRev={1} cellHeight={panel.options.cellHeight} initialSortBy={panel.options.sortBy} />; }
  if (panel.type === 'state-timeline') { return <States {...{ panel, data, width, height }} />; }
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

function Header({ dashboard }) {
  const box = { border: `1px solid ${theme.colors.border.medium}`, borderRadius: 2, padding: '5px 8px', marginRight: 8, whiteSpace: 'nowrap' };
  return <div style={{ height: HEADER, padding: `0 ${PADDING}px`, color: theme.colors.text.primary }}>
    <div style={{ display: 'flex', height: 80, alignItems: 'center', justifyContent: 'space-between' }}>
      <h1 style={{ fontSize: 20, margin: 0 }}>{dashboard.title}</h1>
      <span><span style={box}>last {SECONDS} s</span><span style={box}>{dashboard.refresh}</span></span></div>
    <div style={{ display: 'flex', height: 32 }}>
      {dashboard.templating.list.map((one) => <span key={one.name} style={box}><b style={{ color: quiet }}>{one.label}</b>&nbsp; {one.name === 'datasource' ? 'Prometheus' : parameters.get(`var-${one.name}`) || 'All'}</span>)}
      {dashboard.links.map((one) => <span key={one.title} style={{ ...box, marginLeft: 'auto' }}>{one.title}</span>)}</div></div>;
}

function Dashboard({ dashboard, loaded }) {
  return <ThemeContext.Provider value={theme}><GlobalStyles />
    <div style={{ position: 'relative', width: WIDTH, background: theme.colors.background.canvas }}>
      <Header dashboard={dashboard} />
      {dashboard.panels.map((panel) => {
        const { x, y, w, h } = panel.gridPos;
        const at = { position: 'absolute', left: PADDING + x * COLUMN, top: HEADER + y * ROW, width: w * COLUMN - 8, height: h * ROW - 8 };
        if (panel.type === 'row') { return <h4 key={panel.id} style={{ ...at, margin: 0, paddingTop: 4, color: theme.colors.text.primary }}>{panel.title}</h4>; }
        return <div key={panel.id} style={at}><PanelChrome title={panel.title} width={at.width} height={at.height} padding="none">
          {(width, height) => <Guard title={panel.title}><Content {...{ panel, width, height }} data={loaded.get(panel.id)} /></Guard>}
        </PanelChrome></div>;
      })}
    </div></ThemeContext.Provider>;
}

window.addEventListener('error', (event) => report.react.push({ panel: '', error: `${event.message} ${String(event.error?.stack).split('\n').slice(1, 4).join(' ')}` }));
const dashboard = await (await fetch(`/dashboards/${parameters.get('dashboard')}.json`)).json();
const loaded = new Map();
for (const panel of dashboard.panels) {
  if (panel.type !== 'row') { loaded.set(panel.id, await load(panel)); }
}
createRoot(document.getElementById('root')).render(<Dashboard dashboard={dashboard} loaded={loaded} />);
setTimeout(() => {
  const script = Object.assign(document.createElement('script'), { type: 'application/json', id: 'report' });
  report.canvases = document.querySelectorAll('canvas').length;
  script.textContent = JSON.stringify(report).replaceAll('<', '\\u003c');
  document.body.append(script);
}, 2500);
