// Puts the page together, and turns its address into what is on show: #chat, #chat/ID, #status or #cluster.
import { Chat } from './chat.js';
import { ClusterView } from './cluster-view.js';
import { byId } from './dom.js';
import { drawIcons } from './icons.js';
import { Server } from './server.js';
import { startShortcuts } from './shortcuts.js';
import { showState } from './state.js';
import { StatusView } from './status-view.js';
import { Store } from './store.js';
import { startTheme } from './theme.js';
import { toast } from './toast.js';

const TABS = ['chat', 'status', 'cluster'];

drawIcons();
startTheme();
const server = new Server();
const status = new StatusView();
const cluster = new ClusterView(() => (server.models.length > 1 ? server.model ?? null : null));
const store = await Store.open();
const chat = new Chat(store, server);
startShortcuts({ create: () => chat.create(), search: () => chat.search(), write: () => chat.focus() });
let askedForKey = false;

server.onChange(() => {
  showState(server);
  status.show(server);
  if (server.error?.status === 401 && !askedForKey) {
    askedForKey = true;
    chat.askForKey();
  }
});
addEventListener('hashchange', route);
byId('skip').addEventListener('click', (event) => {
  event.preventDefault();
  if (byId('chat').hidden) location.hash = '#chat';
  chat.focus();
});
if (!store.lasting) toast('This browser keeps no data: conversations end with the page.');
await route();
document.documentElement.dataset.started = '';

async function route() {
  const [view, id = ''] = location.hash.slice(1).split('/');
  const shown = TABS.includes(view) ? view : 'chat';
  for (const tab of TABS) {
    byId(tab).hidden = tab !== shown;
    mark(`tab-${tab}`, tab === shown);
  }
  server.watch(shown === 'status');
  cluster.watch(shown === 'cluster');
  if (shown === 'chat') await chat.open(id);
}

function mark(id, current) {
  if (current) byId(id).setAttribute('aria-current', 'page');
  else byId(id).removeAttribute('aria-current');
}
