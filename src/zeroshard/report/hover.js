// Read-outs: the pointer, or the arrow keys, pick one reading of a chart; without this script the page is complete.
for (const plot of document.querySelectorAll(".plot[data-holds]")) {
  const readings = JSON.parse(plot.querySelector("script").textContent);
  const tip = plot.querySelector("output");
  const rule = plot.querySelector(".rule");
  const cover = plot.querySelector(".cover");
  const holds = plot.dataset.holds === "yes";
  let at = -1;

  // one of the two drawings is shown: map fractions of its plot area to page pixels
  const area = () => {
    const svg = [...plot.querySelectorAll("svg")].find((drawing) => drawing.getBoundingClientRect().width);
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const left = svg.dataset.left * scale;
    return { left, width: svg.dataset.right * scale - left };
  };

  const pick = (fraction) => {
    let next = readings.findIndex((reading) => reading[0] > fraction);
    if (next < 0) next = readings.length;
    const nearer = next < readings.length && fraction - readings[Math.max(next - 1, 0)][0] > readings[next][0] - fraction;
    return Math.max(holds || !nearer ? next - 1 : next, 0);
  };

  const show = (index) => {
    at = Math.min(Math.max(index, 0), readings.length - 1);
    const { left, width } = area();
    const place = left + readings[at][0] * width;
    tip.textContent = readings[at][1];
    tip.hidden = rule.hidden = false;
    rule.style.left = `${place}px`;
    const before = place + 14 + tip.offsetWidth > plot.clientWidth;
    tip.style.left = `${Math.max(0, before ? place - 14 - tip.offsetWidth : place + 14)}px`;
  };

  const hide = () => {
    tip.hidden = rule.hidden = true;
  };

  cover.tabIndex = 0;
  cover.addEventListener("pointermove", (event) => {
    const { left, width } = area();
    show(pick((event.clientX - plot.getBoundingClientRect().left - left) / width));
  });
  cover.addEventListener("pointerleave", hide);
  cover.addEventListener("blur", hide);
  cover.addEventListener("focus", () => show(at));
  cover.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -readings.length, End: readings.length }[event.key];
    if (move) {
      show(at + move);
      event.preventDefault();
    } else if (event.key === "Escape") {
      hide();
    }
  });
}
