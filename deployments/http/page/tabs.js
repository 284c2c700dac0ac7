/** Tabs that the arrow keys reach; the chosen one is in the address, so that it can be linked. */

/**
 * @param {HTMLElement} list With the role tablist; each tab controls a panel.
 * @param {(name: string) => void} onChoice Called with the id of the panel that is shown.
 */
export function startTabs(list, onChoice) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const panel = (tab) => tab.getAttribute("aria-controls");
  const choose = (chosen) => {
    for (const tab of tabs) {
      const isChosen = tab === chosen;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      document.getElementById(panel(tab)).hidden = !isChosen;
    }
    history.replaceState(null, "", `#${panel(chosen)}`);
    onChoice(panel(chosen));
  };
  for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
  list.addEventListener("keydown", ({ key }) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.focus();
    choose(next);
  });
  choose(tabs.find((tab) => `#${panel(tab)}` === location.hash) ?? tabs[0]);
}
