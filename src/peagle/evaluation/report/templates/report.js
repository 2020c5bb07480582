// Tooltips of the charts, and tables sorted by a click on a heading. The page reads well without.
"use strict";

const tip = document.getElementById("tip");

function show(event) {
  const hit = event.target.closest?.("[data-tip]");
  tip.hidden = !hit;
  if (!hit) return;
  tip.textContent = hit.dataset.tip;
  const box = hit.getBoundingClientRect();
  const left = box.left + box.width / 2 - tip.offsetWidth / 2;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
  const above = box.top - tip.offsetHeight - 6;
  tip.style.top = `${above < 8 ? box.bottom + 6 : above}px`;
}
for (const kind of ["pointerover", "pointerdown"]) document.addEventListener(kind, show);
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });

// "1,234 (1,200 to 1,250)" sorts as 1234; what begins with no number sorts as text, after numbers.
function value(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = Number.parseFloat(text.replaceAll(",", "").replace(/^[^\d.-]*(?=\d)/, ""));
  return [Number.isNaN(number) ? 1 : 0, Number.isNaN(number) ? text : number];
}

function sort(heading, column) {
  const table = heading.closest("table");
  const rises = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", rises ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows].map(row => [value(row, column), row]);
  rows.sort(([a], [b]) => {
    if (a[0] !== b[0]) return a[0] - b[0];
    const order = a[1] < b[1] ? -1 : a[1] > b[1] ? 1 : 0;
    return rises ? order : -order;
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

for (const heading of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => sort(heading, heading.cellIndex));
}
