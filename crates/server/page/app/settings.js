// What a conversation asks of the model. An absent value leaves the choice to the server.
import { recall, remember } from './memory.js';

const NUMBERS = ['temperature', 'top_p', 'max_tokens', 'seed'];

/** What new conversations begin with: whatever was chosen last. */
export const lastSettings = () => recall('settings', {});

/** Settings from the fields of the dialog. Throws an Error that says which field is wrong. */
export function settingsFrom(fields) {
  const settings = {};
  for (const name of ['system', 'tools', 'model']) {
    const text = fields.get(name)?.trim();
    if (text) settings[name] = text;
  }
  for (const name of NUMBERS) {
    const text = fields.get(name)?.trim();
    if (text) settings[name] = Number(text);
  }
  if (settings.tools) toolsOf(settings);
  remember('settings', settings);
  return settings;
}

/** The part of a request that settings decide. */
export function requestOf(settings) {
  const request = {};
  for (const name of NUMBERS) if (settings[name] !== undefined) request[name] = settings[name];
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
