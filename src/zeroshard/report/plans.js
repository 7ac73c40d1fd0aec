// All plans: links, rows and points show one plan; without this script all are shown.
const listed = document.querySelector("table.plans");
const sections = [...document.querySelectorAll("section.plan")];

const show = (id, move) => {
  const section = sections.find((one) => one.id === id) ?? sections[0];
  for (const one of sections) one.hidden = one !== section;
  for (const row of document.querySelectorAll("tr[data-plan]")) row.classList.toggle("chosen", row.dataset.plan === section.id);
  if (move) {
    section.focus({ preventScroll: true });
    section.scrollIntoView();
  }
};

listed?.tBodies[0].addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (!event.target.closest("a") && !String(getSelection())) row.querySelector("a").click();
});
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
    const link = listed.querySelector(`tr[data-plan="${back.dataset.plan}"] a`);
    link.focus({ preventScroll: true });
    listed.closest("section").scrollIntoView();
  });
}

if (sections.length) {
  addEventListener("hashchange", () => show(location.hash.slice(1), true));
  show(location.hash.slice(1), false);
}
