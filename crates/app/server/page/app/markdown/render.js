// Blocks into elements. The only place that decides what markup an answer may become.
import { copyButton } from '../clipboard.js';
import { h } from '../dom.js';
import { highlighted } from './highlight.js';
import { parseInline } from './inline.js';
import { renderMaths } from './maths.js';

/** The element of one block. `growing`: more of it may still come (see parseInline). */
export function renderBlock(block, growing = false) {
  switch (block.type) {
    case 'heading':
      // The page's own heading comes first: an answer's begin below it.
      return h(`h${Math.min(block.level + 1, 6)}`, { class: `level-${block.level}` }, ...renderInline(block.text, growing));
    case 'code':
      return renderCode(block, growing);
    case 'quote':
      return h('blockquote', {}, ...block.blocks.map((inner) => renderBlock(inner, growing)));
    case 'list':
      return renderList(block, growing);
    case 'table':
      return renderTable(block, growing);
    case 'rule':
      return h('hr');
    case 'maths':
      return block.closed ? renderMaths('div', block.text, true) : h('p', {}, block.source);
    default:
      return h('p', {}, ...renderInline(block.text, growing));
  }
}

function renderInline(text, growing) {
  return parseInline(text, { growing }).map(renderNode);
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
    case 'link':
      return h('a', { href: node.href, target: '_blank', rel: 'noopener noreferrer nofollow' }, ...node.children.map(renderNode));
    default:
      return h(node.type, {}, ...node.children.map(renderNode));
  }
}

/** While it grows, code is one text node to append to; colour comes when it is complete. */
function renderCode({ language, text }, growing) {
  const code = h('code', {}, ...(growing ? [document.createTextNode(text)] : highlighted(text, language)));
  return h('div', { class: 'code' },
    h('div', { class: 'code-head' }, h('span', {}, language || 'text'), copyButton(() => code.textContent, 'Copy code')),
    h('pre', { tabindex: '0', role: 'region', 'aria-label': language ? `Code, ${language}` : 'Code' }, code));
}

function renderList({ ordered, first, tight, items }, growing) {
  const rendered = items.map(({ task, blocks }, i) => {
    const last = growing && i === items.length - 1;
    const content = blocks.flatMap((block) =>
      tight && block.type === 'paragraph' ? renderInline(block.text, last) : [renderBlock(block, last)]);
    if (task === null) return h('li', {}, ...content);
    return h('li', { class: 'task' }, h('input', { type: 'checkbox', disabled: true, checked: task, 'aria-label': task ? 'done' : 'to do' }), ...content);
  });
  return ordered ? h('ol', { start: first === 1 ? null : first }, ...rendered) : h('ul', {}, ...rendered);
}

function renderTable({ align, head, rows }, growing) {
  const cell = (tag, text, column) => h(tag, { class: align[column] && `align-${align[column]}`, scope: tag === 'th' ? 'col' : null }, ...renderInline(text, growing));
  const row = (tag, cells) => h('tr', {}, ...cells.map((text, column) => cell(tag, text, column)));
  return h('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': 'Table' },
    h('table', {}, h('thead', {}, row('th', head)), h('tbody', {}, ...rows.map((cells) => row('td', cells)))));
}
