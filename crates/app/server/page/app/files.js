// Files that go with a message: of text, or PDFs, of which the text is taken.
import { PDF_BYTES_MAX, pdfText } from './pdf/text.js';

/** At most this many files with a message, and this many bytes in each. */
export const FILES_MAX = 8;
export const FILE_BYTES_MAX = 256 << 10;

/** The text of a file: `{ name, text }`. Throws an Error that says why it cannot be sent. */
export async function readText(file) {
  if (/\.pdf$/i.test(file.name) || file.type === 'application/pdf') return readPdf(file);
  if (file.size > FILE_BYTES_MAX) throw new Error(`${file.name} is larger than ${FILE_BYTES_MAX >> 10} KiB`);
  let text;
  try {
    text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text file in UTF-8`);
  }
  if (text.includes('\0')) throw new Error(`${file.name} is not a text file`);
  return { name: file.name, text };
}

async function readPdf(file) {
  if (file.size > PDF_BYTES_MAX) throw new Error(`${file.name} is larger than ${PDF_BYTES_MAX >> 20} MiB`);
  let text;
  try {
    text = await pdfText(new Uint8Array(await file.arrayBuffer()));
  } catch (error) {
    throw new Error(`${file.name} ${error.message}`);
  }
  if (new TextEncoder().encode(text).length > FILE_BYTES_MAX) throw new Error(`${file.name} has more than ${FILE_BYTES_MAX >> 10} KiB of text`);
  return { name: file.name, text };
}

/** A file as part of a message: its name, and a fenced block that nothing in the text can end. */
export function fenced({ name, text }) {
  let fence = '```';
  for (const [run] of text.matchAll(/`+/g)) if (run.length >= fence.length) fence = `${run}\``;
  const ending = /\.([a-z0-9+]{1,12})$/i.exec(name)?.[1].toLowerCase() ?? '';
  const language = ending === 'pdf' ? '' : ending;
  return `${name}:\n${fence}${language}\n${text.replace(/\n$/, '')}\n${fence}`;
}
