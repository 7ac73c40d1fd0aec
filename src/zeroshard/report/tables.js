// Tables: a click on a head sorts the rows by the column, by the number of a cell where it has one. Sums stay below.
const keyOf = (row, column) => {
  const cell = row.cells[column];
  const text = cell.dataset.value ?? cell.textContent.trim();
  return text === "" || text === "–" ? null : isNaN(text) ? text : Number(text);
};
const ordered = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
const sortRows = (table, column) => {
  const heads = [...table.tHead.rows[0].cells];
  const down = heads[column].getAttribute("aria-sort") === "ascending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row, column), row]);
  rows.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (down ? -1 : 1) * ordered(a, b)));
  table.tBodies[0].append(...rows.map(([, row]) => row)); // unknown values last
};
for (const table of document.querySelectorAll("table.sorted")) {
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.type = "button";
    button.addEventListener("click", () => sortRows(table, column));
    head.append(button);
  }
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
