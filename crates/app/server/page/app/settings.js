// What a conversation asks of the model. An absent value leaves the choice to the server.
import { recall, remember } from './memory.js';

const TEXTS = ['system', 'tools', 'stop'];
const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'presence_penalty', 'frequency_penalty', 'max_tokens', 'seed'];

/** What new conversations begin with: whatever was chosen last. */
export const lastSettings = () => knownSettings(recall('settings', {}));

/** The settings among the values of an object that came from elsewhere: storage, or an imported file. */
export function knownSettings(values) {
  const settings = {};
  for (const name of TEXTS) if (typeof values?.[name] === 'string') settings[name] = values[name];
  for (const name of NUMBERS) if (Number.isFinite(values?.[name])) settings[name] = values[name];
  return settings;
}

/** Settings from the fields of the dialog. Throws an Error that says which field is wrong. */
export function settingsFrom(fields) {
  const settings = {};
  for (const name of TEXTS) {
    const text = fields.get(name) ?? '';
    // A stop string may begin or end with a space.
    if (text.trim()) settings[name] = name === 'stop' ? text : text.trim();
  }
  for (const name of NUMBERS) {
    const text = fields.get(name)?.trim();
    if (text) settings[name] = Number(text);
  }
  toolsOf(settings);
  if (fields.get('lasting')) remember('settings', settings);
  return settings;
}

/** What applies where a field is empty, as its placeholder. */
export function defaultsOf(status) {
  const defaults = status?.sampling_defaults ?? {};
  const shown = {};
  for (const name of ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'presence_penalty', 'frequency_penalty']) {
    // The server computes in 32 bits: 0.95 may come as 0.949999988.
    shown[name] = Number.isFinite(defaults[name]) ? String(Number(defaults[name].toPrecision(5))) : 'default';
  }
  return shown;
}

/** The part of a request that settings decide. */
export function requestOf(settings) {
  const request = {};
  for (const name of NUMBERS) if (settings[name] !== undefined) request[name] = settings[name];
  const stop = (settings.stop ?? '').split(/\r?\n/).filter(Boolean);
  if (stop.length) request.stop = stop.map((line) => line.replaceAll('\\n', '\n'));
  const tools = toolsOf(settings);
  if (tools.length) request.tools = tools;
  return request;
}

function toolsOf({ tools = '' }) {
  if (!tools) return [];
  let list;
  try {
    list = JSON.parse(tools);
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(list)) throw new Error('Tools must be a JSON list');
  return list;
}
