"use strict";
const units = { ns: 1e-9, "µs": 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 };
const numberOf = (text) => {
  const found = text.match(/^\s*([+-]?\d[\d,]*(?:\.\d+)?)(?:x|\s*(ns|µs|ms|s|B|KiB|MiB|GiB))?(?!\w)/);
  return found ? parseFloat(found[1].replaceAll(",", "")) * (units[found[2]] || 1) : NaN;
};
const compare = (one, other) => {
  const left = numberOf(one), right = numberOf(other);
  if (isNaN(left) !== isNaN(right)) return isNaN(left) ? 1 : -1;
  // A date begins with the number of its year.
  return (isNaN(left) ? 0 : left - right) || one.localeCompare(other);
};
const textOf = (row, column) => row.cells[column].textContent.trim();

const sortBy = (table, header) => {
  const column = [...header.parentNode.children].indexOf(header), body = table.tBodies[0];
  const falls = header.getAttribute("aria-sort") === "ascending";
  const rows = [...body.rows].sort((one, other) => {
    const left = textOf(one, column), right = textOf(other, column);
    // What is not a number stays last, whatever the direction.
    if (isNaN(numberOf(left)) || isNaN(numberOf(right))) return compare(left, right);
    return falls ? compare(right, left) : compare(left, right);
  });
  const words = rows.every((row) => isNaN(numberOf(textOf(row, column))));
  if (words && falls) rows.reverse();
  body.classList.add("mixed");
  body.append(...rows);
  for (const each of header.parentNode.children) each.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", falls ? "descending" : "ascending");
};
for (const table of document.querySelectorAll("table.sortable")) {
  for (const header of table.tHead.rows[0].cells) {
    if (!header.textContent.trim()) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sortBy(table, header));
    header.append(button);
  }
}

// In the order of the document a test is named on its first row. In another order, each row needs the name.
for (const row of document.querySelectorAll("#rows .again")) {
  row.cells[0].prepend(row.previousElementSibling.cells[0].querySelector("a").cloneNode(true));
}

const tools = document.querySelector(".tools");
if (tools) {
  const words = tools.querySelector("input"), verdict = tools.querySelector("select");
  const rows = [...document.querySelectorAll("#rows tbody tr")], tests = [...document.querySelectorAll(".test")];
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean), word = verdict.value;
    const fits = (name, found) => wanted.every((each) => name.includes(each)) && (!word || found === word);
    let shown = 0;
    for (const row of rows) {
      const fit = fits(row.cells[0].textContent.toLowerCase(), row.querySelector(".v").textContent.trim());
      row.hidden = !fit;
      shown += fit;
    }
    for (const test of tests) {
      const found = test.querySelector("summary"), own = test.dataset.words.split("|");
      test.hidden = !fits(found.querySelector("code").textContent.toLowerCase(), own.includes(word) ? word : "");
    }
    document.querySelector("#rows tbody").classList.toggle("mixed", Boolean(wanted.length || word));
    tools.querySelector("output").value = `${shown} of ${rows.length}`;
  };
  words.addEventListener("input", filter);
  verdict.addEventListener("change", filter);
  tools.querySelector("button").addEventListener("click", (event) => {
    const open = tests.some((each) => !each.open);
    for (const each of tests) each.open = open;
    event.target.textContent = open ? "Fold all tests" : "Unfold all tests";
  });
  tools.hidden = false;
  filter();
}

const unfold = () => {
  const found = document.getElementById(location.hash.slice(1));
  if (found instanceof HTMLDetailsElement) found.open = true;
};
addEventListener("hashchange", unfold);
unfold();
