// Light, dark, or as the system has it. first-paint.js applies the same choice before anything is drawn.
import { byId } from './dom.js';
import { recall, remember } from './memory.js';

export function startTheme() {
  const choices = byId('theme');
  const chosen = recall('theme', 'auto');
  for (const input of choices.querySelectorAll('input')) input.checked = input.value === chosen;
  apply(chosen);
  choices.addEventListener('change', (event) => {
    remember('theme', event.target.value);
    apply(event.target.value);
  });
}

function apply(theme) {
  if (theme === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}
