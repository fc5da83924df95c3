// Part of index.html. Runs before the first paint, which modules cannot: a chosen theme must not flash in the other one.
try {
  const theme = JSON.parse(localStorage.getItem('consort.theme'));
  if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme;
} catch {
  // Storage is closed to us or holds something else: the system's theme it is.
}
