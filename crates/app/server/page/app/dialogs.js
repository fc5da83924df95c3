// The two dialogs: settings of the conversation, and the API key.
import { apiKey } from './api.js';
import { byId, setText } from './dom.js';
import { defaultsOf, settingsFrom } from './settings.js';
import { sentence } from './words.js';

/** Opens the settings. `status` is the server's, if it is known. `onSave(settings)` is called if they are saved. */
export function openSettings(settings, status, onSave) {
  const dialog = byId('settings');
  const form = dialog.querySelector('form');
  for (const field of form.elements) {
    if (field.name && field.type !== 'checkbox') field.value = settings[field.name] ?? '';
  }
  for (const [name, value] of Object.entries(defaultsOf(status))) form.elements[name].placeholder = value;
  open(dialog, () => onSave(settingsFrom(new FormData(form))));
}

/**
 * Asks for the key. `check(key)` tries it and throws an Error if the server does not accept it: then it is asked for again.
 * `accept(key)` is called with one that is accepted. Until then, and if the dialog is cancelled, the former key stays.
 */
export function openKey(check, accept) {
  const dialog = byId('key');
  if (dialog.open) return;
  const field = dialog.querySelector('form').elements.key;
  field.value = apiKey();
  open(dialog, async () => {
    const key = field.value.trim();
    try {
      await check(key);
    } catch (error) {
      field.select();
      throw error;
    }
    if (dialog.open) await accept(key);
  });
}

/** Shows `dialog` until it is cancelled or `submit()` succeeds. If it throws, the dialog shows why. */
function open(dialog, submit) {
  const problem = dialog.querySelector('.problem');
  setText(problem, '');
  problem.hidden = true;
  dialog.querySelector('form').onsubmit = async (event) => {
    event.preventDefault();
    try {
      await submit();
      dialog.close();
    } catch (error) {
      setText(problem, sentence(error.message));
      problem.hidden = false;
    }
  };
  dialog.querySelector('[data-cancel]').onclick = () => dialog.close();
  // A press on the backdrop is a press on the dialog itself: its content fills it.
  dialog.onpointerdown = (event) => {
    if (event.target === dialog) dialog.close();
  };
  dialog.showModal();
}
