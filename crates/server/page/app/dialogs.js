// The two dialogs: settings of the conversation, and the API key.
import { apiKey, setApiKey } from './api.js';
import { byId, h } from './dom.js';
import { settingsFrom } from './settings.js';

/** Opens the settings. `onSave(settings)` is called if they are saved. */
export function openSettings(settings, models, onSave) {
  const dialog = byId('settings');
  const form = dialog.querySelector('form');
  const problem = dialog.querySelector('.problem');
  const select = form.elements.model;
  select.replaceChildren(...models.map((model) => h('option', { value: model }, model)));
  byId('model-row').hidden = models.length < 2;
  for (const field of form.elements) {
    if (field.name) field.value = settings[field.name] ?? (field === select ? models[0] ?? '' : '');
  }
  problem.hidden = true;
  open(dialog, () => {
    try {
      onSave(settingsFrom(new FormData(form)));
      return true;
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
      return false;
    }
  });
}

/** Opens the key field. `onSave()` is called once the new key is in use. */
export function openKey(onSave) {
  const dialog = byId('key');
  if (dialog.open) return;
  const field = dialog.querySelector('form').elements.key;
  field.value = apiKey();
  open(dialog, () => {
    setApiKey(field.value.trim());
    onSave();
    return true;
  });
}

/** Shows `dialog` until it is cancelled or `submit()` says that all is well. */
function open(dialog, submit) {
  const form = dialog.querySelector('form');
  form.onsubmit = (event) => {
    event.preventDefault();
    if (submit()) dialog.close();
  };
  dialog.querySelector('[data-cancel]').onclick = () => dialog.close();
  // A press on the backdrop is a press on the dialog itself: its content fills it.
  dialog.onpointerdown = (event) => {
    if (event.target === dialog) dialog.close();
  };
  dialog.showModal();
}
