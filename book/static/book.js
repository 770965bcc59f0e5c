// A click on a figure shows it over the page, as large as the window; another click, or Escape, closes it.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a.figure");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || !window.HTMLDialogElement) return;
  event.preventDefault();
  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  dialog.append(link.querySelector("img").cloneNode());
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("keydown", (press) => press.key === "Escape" && dialog.close()); // not all browsers do it alone
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
});
