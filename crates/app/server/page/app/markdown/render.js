// Blocks into elements. The only place that decides what markup an answer may become.
import { copyButton } from '../clipboard.js';
import { h } from '../dom.js';
import { highlighted } from './highlight.js';
import { parseInline } from './inline.js';
import { renderMaths } from './maths.js';

/** The element of one block. `growing`: more of it may still come; `notes`: labels of footnotes (see parseInline). */
export function renderBlock(block, growing = false, notes = new Set()) {
  switch (block.type) {
    case 'heading':
      // The page's own heading comes first: an answer's begin below it.
      return h(`h${Math.min(block.level + 1, 6)}`, { class: `level-${block.level}` }, ...renderInline(block.text, growing, notes));
    case 'code':
      return renderCode(block, growing);
    case 'quote':
      return h('blockquote', {}, ...block.blocks.map((inner) => renderBlock(inner, growing, notes)));
    case 'details':
      return h('details', { class: 'fold', open: block.open }, h('summary', {}, h('span', {}, ...renderInline(block.summary || 'Details', growing, notes))),
        h('div', { class: 'inside' }, ...block.blocks.map((inner) => renderBlock(inner, growing, notes))));
    case 'footnote':
      return renderNote(block, growing, notes);
    case 'list':
      return renderList(block, growing, notes);
    case 'table':
      return renderTable(block, growing, notes);
    case 'rule':
      return h('hr');
    case 'maths':
      return block.closed ? renderMaths('div', block.text, true) : h('p', {}, block.source);
    default:
      return h('p', {}, ...renderInline(block.text, growing, notes));
  }
}

function renderInline(text, growing, notes) {
  return parseInline(text, { growing, notes }).map(renderNode);
}

function renderNode(node) {
  switch (node.type) {
    case 'text':
      return document.createTextNode(node.text);
    case 'br':
      return h('br');
    case 'code':
      return h('code', {}, node.text);
    case 'maths':
      return renderMaths('span', node.text, node.display);
    case 'note':
      return h('sup', {}, h('button', { type: 'button', class: 'note', 'data-note': node.label, 'aria-label': `Footnote ${node.label}`, onclick: goToNote }, node.label));
    case 'link':
      return h('a', { href: node.href, target: '_blank', rel: 'noopener noreferrer nofollow' }, ...node.children.map(renderNode));
    default:
      return h(node.type, {}, ...node.children.map(renderNode));
  }
}

/** The page's address says which view is on show, so notes are no links within it. */
function renderNote({ label, blocks }, growing, notes) {
  const mark = h('sup', {}, h('button', { type: 'button', class: 'note', 'aria-label': `Back from footnote ${label}`, onclick: goToReference }, label));
  return h('div', { class: 'footnote', role: 'note', tabindex: '-1', 'data-label': label }, mark, h('div', {}, ...blocks.map((block) => renderBlock(block, growing, notes))));
}

function goToNote({ currentTarget }) {
  goTo(currentTarget, (inside) => [...inside.querySelectorAll('.footnote')].find(({ dataset }) => dataset.label === currentTarget.dataset.note));
}

function goToReference({ currentTarget }) {
  const { label } = currentTarget.closest('.footnote').dataset;
  goTo(currentTarget, (inside) => [...inside.querySelectorAll('[data-note]')].find(({ dataset }) => dataset.note === label));
}

function goTo(from, find) {
  const element = find(from.closest('.markdown'));
  element?.scrollIntoView({ block: 'nearest' });
  element?.focus();
}

/** While it grows, code is one text node to append to; colour comes when it is complete. */
function renderCode({ language, text }, growing) {
  const code = h('code', {}, ...(growing ? [document.createTextNode(text)] : highlighted(text, language)));
  return h('div', { class: 'code' },
    h('div', { class: 'code-head' }, h('span', {}, language || 'text'), copyButton(() => code.textContent, 'Copy code')),
    h('pre', { tabindex: '0', role: 'region', 'aria-label': language ? `Code, ${language}` : 'Code' }, code));
}

function renderList({ ordered, first, tight, items }, growing, notes) {
  const rendered = items.map(({ task, blocks }, i) => {
    const last = growing && i === items.length - 1;
    const content = blocks.flatMap((block) =>
      tight && block.type === 'paragraph' ? renderInline(block.text, last, notes) : [renderBlock(block, last, notes)]);
    if (task === null) return h('li', {}, ...content);
    return h('li', { class: 'task' }, h('input', { type: 'checkbox', disabled: true, checked: task, 'aria-label': task ? 'done' : 'to do' }), ...content);
  });
  return ordered ? h('ol', { start: first === 1 ? null : first }, ...rendered) : h('ul', {}, ...rendered);
}

function renderTable({ align, head, rows }, growing, notes) {
  const cell = (tag, text, column) => h(tag, { class: align[column] && `align-${align[column]}`, scope: tag === 'th' ? 'col' : null }, ...renderInline(text, growing, notes));
  const row = (tag, cells) => h('tr', {}, ...cells.map((text, column) => cell(tag, text, column)));
  return h('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': 'Table' },
    h('table', {}, h('thead', {}, row('th', head)), h('tbody', {}, ...rows.map((cells) => row('td', cells)))));
}
