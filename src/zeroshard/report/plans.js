// All plans: heads sort the table, and links, rows and points show one plan; without this script all are shown.
const table = document.querySelector("table.plans");
const sections = [...document.querySelectorAll("section.plan")];

const show = (id, move) => {
  const section = sections.find((one) => one.id === id) ?? sections[0];
  for (const one of sections) one.hidden = one !== section;
  for (const mark of document.querySelectorAll("tr[data-plan], a.point")) {
    const target = mark.dataset.plan ?? mark.getAttribute("href").slice(1);
    mark.classList.toggle("chosen", target === section.id);
  }
  if (move) {
    section.focus({ preventScroll: true });
    section.scrollIntoView();
  }
};

if (table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? (cell.classList.contains("words") ? cell.textContent.trim() : "");
    return text === "" ? null : isNaN(text) ? text : Number(text);
  };
  const sort = (column) => {
    const down = heads[column].getAttribute("aria-sort") === "ascending";
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b));
    const rows = [...body.rows].map((row) => [keyOf(row, column), row]);
    rows.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (down ? -1 : 1) * compare(a, b)));
    body.append(...rows.map(([, row]) => row)); // unknown values last
  };
  for (const [column, head] of heads.entries()) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.type = "button";
    button.addEventListener("click", () => sort(column));
    head.append(button);
  }
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (!event.target.closest("a") && !String(getSelection())) row.querySelector("a").click();
  });
}

for (const link of document.querySelectorAll('a[href^="#plan-"]')) {
  link.addEventListener("click", (event) => {
    const id = link.getAttribute("href").slice(1);
    event.preventDefault();
    history.replaceState(null, "", `#${id}`);
    show(id, true);
  });
}
for (const back of document.querySelectorAll("a.back")) {
  back.addEventListener("click", (event) => {
    event.preventDefault();
    const link = table.querySelector(`tr[data-plan="${back.dataset.plan}"] a`);
    link.focus({ preventScroll: true });
    table.closest("section").scrollIntoView();
  });
}

for (const holder of document.querySelectorAll(".copied")) {
  const text = holder.querySelector("pre");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text); // a page from a file may not write to the clipboard
      button.textContent = "Selected: press Ctrl+C";
    }
  });
  holder.append(button);
}

if (sections.length) {
  addEventListener("hashchange", () => show(location.hash.slice(1), true));
  show(location.hash.slice(1), false);
}
