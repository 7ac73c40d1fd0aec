// Charts: each figure holds the traces and the layout of one as JSON. Plotly draws it when it comes into view, in the
// colours of the page, which are those of the light or of the dark scheme.
const resolved = (value, style) => {
  if (typeof value === "string") {
    return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
  }
  if (Array.isArray(value)) return typeof value[0] === "number" && typeof value.at(-1) === "number" ? value : value.map((one) => resolved(one, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, resolved(one, style)]));
};
const merged = (below, above) => {
  const both = { ...below };
  for (const [key, value] of Object.entries(above)) {
    const nested = value !== null && typeof value === "object" && !Array.isArray(value) && typeof both[key] === "object";
    both[key] = nested ? merged(both[key], value) : value;
  }
  return both;
};
const AXIS = {
  color: "var(--quiet)",
  gridcolor: "var(--grid)",
  linecolor: "var(--quiet)",
  zeroline: false,
  automargin: true,
  title: { standoff: 8 },
};
const LAYOUT = {
  autosize: true,
  font: { family: 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif', size: 12, color: "var(--ink)" },
  paper_bgcolor: "var(--panel)",
  plot_bgcolor: "var(--panel)",
  hovermode: "x unified",
  hoverlabel: { bgcolor: "var(--panel)", bordercolor: "var(--quiet)", font: { color: "var(--ink)" }, namelength: -1 },
  margin: { l: 56, r: 16, t: 8, b: 44 },
  legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
  dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
  uirevision: "kept", // a change of colours leaves zoom and legend as they are
};
const CONFIG = { displayModeBar: false }; // the page has buttons of its own
const NARROW = 560; // pixels

const drawChart = async (figure) => {
  const plot = figure.querySelector(".plot");
  const content = JSON.parse(figure.querySelector("script").textContent);
  const style = getComputedStyle(document.documentElement);
  const shared = { ...LAYOUT, xaxis: AXIS, yaxis: AXIS };
  if (content.layout.yaxis2) shared.yaxis2 = AXIS;
  const layout = merged(shared, content.layout);
  if (figure.dataset.scale) {
    const tickmode = figure.dataset.scale === "log" && layout.yaxis.tickvals ? "array" : "auto";
    layout.yaxis = { ...layout.yaxis, type: figure.dataset.scale, tickmode };
  }
  if (plot.clientWidth < NARROW) layout.legend = { ...layout.legend, font: { size: 11 } };
  const choice = figure.querySelector("select.choice")?.value;
  if (choice) content.traces.forEach((trace, i) => (trace.visible = i === Number(choice)));
  figure.dataset.drawn = "yes";
  await Plotly.react(plot, resolved(content.traces, style), resolved(layout, style), CONFIG);
  // the legend takes its height from the chart: give it back
  const legend = plot.querySelector(".legend");
  const height = Number(figure.dataset.height) + (legend ? Math.ceil(legend.getBoundingClientRect().height) : 0);
  plot.style.height = `${height}px`;
  await Plotly.Plots.resize(plot);
  plot.removeAllListeners?.("plotly_click");
  plot.on("plotly_click", (event) => {
    const target = event.points[0]?.customdata;
    if (typeof target === "string") location.hash = target;
  });
};

const charts = [...document.querySelectorAll("figure.chart")];
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      watcher.unobserve(entry.target);
      drawChart(entry.target);
    }
  },
  { rootMargin: "600px" },
);
for (const figure of charts) {
  watcher.observe(figure);
  const plot = figure.querySelector(".plot");
  figure.querySelector("button.scale")?.addEventListener("click", (event) => {
    const on = event.target.getAttribute("aria-pressed") !== "true";
    event.target.setAttribute("aria-pressed", String(on));
    figure.dataset.scale = on ? "log" : "linear";
    const tickmode = on && plot.layout.yaxis.tickvals ? "array" : "auto";
    Plotly.relayout(plot, { "yaxis.type": figure.dataset.scale, "yaxis.tickmode": tickmode, "yaxis.autorange": true });
  });
  figure.querySelector("select.choice")?.addEventListener("change", () => drawChart(figure));
  figure.querySelector("button.reset").addEventListener("click", () => {
    Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": true });
  });
  figure.querySelector("button.save").addEventListener("click", () => {
    Plotly.downloadImage(plot, { format: "png", width: 1200, height: 600, scale: 2, filename: document.title });
  });
}
const drawAgain = () => charts.filter((figure) => figure.dataset.drawn).forEach(drawChart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
let later = 0;
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone hides its address bar
  width = innerWidth;
  clearTimeout(later);
  later = setTimeout(drawAgain, 100);
});
addEventListener("beforeprint", () => charts.forEach(drawChart));
