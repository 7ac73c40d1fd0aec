// Findings about the page as it is drawn now: texts that are cut or overlap, and texts and lines with too little contrast.
(() => {
  const found = new Set();
  const TEXT = 4.5;
  const LINE = 3;
  const SLACK = 1.5; // pixels that boxes of texts may overlap or stick out: boxes are higher than their letters

  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const seen = new Map();
  const colourOf = (text) => {
    if (!seen.has(text)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = text;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      seen.set(text, [r, g, b, a / 255]);
    }
    return seen.get(text);
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const opacityOf = (element) => {
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) opacity *= Number(getComputedStyle(each).opacity);
    return opacity;
  };
  // what lies below an element, by the backgrounds of its ancestors
  const backgroundOf = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const colour = colourOf(getComputedStyle(each).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, above) => over(above, below), matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1]);
  };
  const paintOf = (shape, x, y) => {
    const style = getComputedStyle(shape);
    if (style.fill !== "none" && colourOf(style.fill)[3] * Number(style.fillOpacity) > 0) {
      const colour = colourOf(style.fill);
      return [...colour.slice(0, 3), colour[3] * Number(style.fillOpacity) * Number(style.opacity)];
    }
    if (style.stroke !== "none" && parseFloat(style.strokeWidth) > 0 && Number(style.strokeOpacity) > 0) {
      const point = shape.ownerSVGElement.createSVGPoint();
      [point.x, point.y] = [x, y];
      if (shape.isPointInStroke?.(point.matrixTransform(shape.getScreenCTM().inverse()))) return colourOf(style.stroke);
    }
    return null;
  };
  // the shape of an image on which a text stands: the last one before it that covers its middle
  const below = (text, x, y) => {
    const svg = text.ownerSVGElement;
    let root = svg;
    while (root.ownerSVGElement) root = root.ownerSVGElement;
    const behind = [...root.querySelectorAll("path, rect")].filter((shape) => {
      if (shape.closest("defs, clipPath")) return false;
      if (!(shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) return false;
      const box = shape.getBoundingClientRect();
      const pad = parseFloat(getComputedStyle(shape).strokeWidth) / 2 || 0;
      return box.left <= x && x <= box.right && box.top - pad <= y && y <= box.bottom + pad;
    });
    let colour = backgroundOf(text);
    for (const shape of behind) {
      const paint = paintOf(shape, x, y);
      const fill = getComputedStyle(shape).fill;
      if (!paint) continue;
      if (shape.tagName === "path" && fill !== "none" && shape.isPointInFill) {
        const point = shape.ownerSVGElement.createSVGPoint();
        [point.x, point.y] = [x, y];
        if (!shape.isPointInFill(point.matrixTransform(shape.getScreenCTM().inverse()))) continue;
      }
      colour = over(paint, colour);
    }
    return colour;
  };

  const visible = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const scrolls = (element) => {
    for (let each = element.parentElement; each && each !== document.body; each = each.parentElement) {
      if (/(auto|scroll)/.test(getComputedStyle(each).overflowX)) return each;
    }
    return null;
  };

  // the texts, each with its boxes
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const element = node.parentElement;
    const words = node.textContent.trim();
    if (!words || element.closest("script, style, noscript, title, desc, .visually-hidden, .sr-only") || !visible(element)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter((box) => box.width > 1 && box.height > 1);
    if (boxes.length) texts.push({ element, words: words.slice(0, 40), boxes, scroller: scrolls(element) });
  }

  const root = document.documentElement;
  if (root.scrollWidth > innerWidth + 1) {
    found.add(`the page is ${root.scrollWidth} pixels wide, the window ${innerWidth}`);
  }
  for (const { element, words, boxes, scroller } of texts) {
    for (const box of boxes) {
      const outside = box.right <= 0 || box.left >= innerWidth; // a drawer that is closed
      if (!scroller && !outside && (box.left < -SLACK || box.right > innerWidth + SLACK)) found.add(`cut by the window: ${words}`);
      for (let each = element; each && each !== document.body; each = each.parentElement) {
        const style = getComputedStyle(each);
        if (each !== element && each === scroller) break;
        if (!/(hidden|clip)/.test(style.overflowX + style.overflowY) || each.tagName === "svg" && style.overflow === "visible") continue;
        const frame = each.getBoundingClientRect();
        if (box.left < frame.left - SLACK || box.right > frame.right + SLACK || box.top < frame.top - 3 || box.bottom > frame.bottom + 3) {
          found.add(`cut by its frame <${each.tagName} ${each.getAttribute("class") ?? ""}>: ${words}`);
        }
      }
    }
    // contrast
    const style = getComputedStyle(element);
    const drawn = element instanceof SVGElement;
    const box = boxes[0];
    const paint = colourOf(drawn ? style.fill : style.color);
    const ground = drawn ? below(element, box.left + box.width / 2, box.top + box.height / 2) : backgroundOf(element);
    const ink = over([...paint.slice(0, 3), paint[3] * opacityOf(element)], ground);
    const ratio = contrast(ink, ground);
    if (ratio < TEXT - 0.01) found.add(`contrast ${ratio.toFixed(2)} of text: ${words}`);
  }

  // overlaps: boxes in order of their upper edges
  const shown = (box, scroller) => {
    const frame = scroller?.getBoundingClientRect() ?? { left: 0, right: innerWidth, top: -Infinity, bottom: Infinity };
    const [left, right] = [Math.max(box.left, frame.left, 0), Math.min(box.right, frame.right, innerWidth)];
    const [top, bottom] = [Math.max(box.top, frame.top), Math.min(box.bottom, frame.bottom)];
    return right > left && bottom > top ? { left, right, top, bottom } : null;
  };
  const floats = (element) => {
    for (let each = element; each; each = each.parentElement) if (/(fixed|sticky)/.test(getComputedStyle(each).position)) return true;
    return false;
  };
  const placed = texts
    .filter((text) => !floats(text.element)) // which lie over the others by design
    .flatMap((text) => text.boxes.map((box) => ({ ...text, box: shown(box, text.scroller) })))
    .filter((text) => text.box)
    .sort((a, b) => a.box.top - b.box.top);
  for (const [i, one] of placed.entries()) {
    for (let j = i + 1; j < placed.length && placed[j].box.top < one.box.bottom - 3; j += 1) {
      const other = placed[j];
      if (one.element === other.element || one.element.contains(other.element) || other.element.contains(one.element)) continue;
      const wide = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
      const high = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
      if (wide > SLACK && high > 3) found.add(`overlap: "${one.words}" and "${other.words}"`);
    }
  }

  // lines and markers of charts
  const LINES = ".scatterlayer path.js-line, .scatterlayer path.point, .fills path.js-fill, .barlayer .point path, .shapelayer path, .xy path.crisp.zl, .legendlines path, .axis, figure.picture svg [stroke]:not(.rule, .tip)";
  for (const shape of document.querySelectorAll(LINES)) {
    if (!visible(shape) || shape.closest(".shaded .barlayer")) continue;
    const box = shape.getBoundingClientRect();
    if (box.width < 1 && box.height < 1) continue;
    const style = getComputedStyle(shape);
    const filled = shape.tagName !== "line" && style.fill !== "none" && Number(style.fillOpacity) > 0;
    const paints = [style.stroke, filled ? style.fill : "none"].filter((paint) => !/none|url/.test(paint));
    const picture = shape.closest("figure.picture")?.querySelector("svg > rect"); // the sheet that it is drawn on
    const ground = picture ? colourOf(getComputedStyle(picture).fill) : backgroundOf(shape);
    const ratios = paints
      .map(colourOf)
      .filter((paint) => paint[3] > 0)
      .map((paint) => contrast(over([...paint.slice(0, 3), paint[3] * opacityOf(shape)], ground), ground));
    const ratio = Math.max(...ratios, ratios.length ? 0 : Infinity); // a border or its fill shows a shape
    if (ratio < LINE - 0.01) found.add(`contrast ${ratio.toFixed(2)} of a line: ${shape.parentElement.getAttribute("class") ?? ""} ${shape.getAttribute("class") ?? shape.tagName} ${paints.join(" ")}`);
  }
  return [...found];
})();
