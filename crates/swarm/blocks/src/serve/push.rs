//! Rows that peers pass on: [`PushTable`] leads those that come to their sessions, [`PushLinks`] sends those that go.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use directory::PeerId;
use tokio::io::AsyncWrite;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::timeout;
use tracing::debug;

use super::Server;
use super::account::{StreamPlace, WaitingPermits, reserve};
use super::client_stream::bytes_of;
use super::session::Job;
use crate::dial::{BoxedStream, Dial, dialable};
use crate::protocols::PUSH_PROTOCOL;
use crate::wire::{FrameError, Next, PushKey, Request, Run, write_frame};

/// Keys of all sessions.
const KEYS_MAX: usize = 16 << 10;
/// Peers to which rows are passed on.
const LINKS_MAX: usize = 256;
/// The same, of those to which one client has led.
pub const LINKS_PER_CLIENT_MAX: usize = 32;
/// Messages that wait to be sent to one peer. With more the client carries the rows.
const LINK_WAITING_MAX: usize = 16;
/// A stream that nobody used for so long is closed.
const IDLE: Duration = Duration::from_secs(300);

/// How long a session waits for a stream to the next peer. After that the client carries its rows.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(3);

type Keys = Arc<Mutex<HashMap<PushKey, Target>>>;

/// A session to which others may pass rows on.
#[derive(Clone)]
struct Target {
    jobs: mpsc::Sender<Job>,
    /// What waits of the session's client: rows are billed to it, not to the peer that passes them on, which does so for many.
    waiting: Arc<Semaphore>,
}

/// The sessions to which others may pass rows on.
#[derive(Default)]
pub(super) struct PushTable(Keys);

/// While it is held, rows with its key reach the session.
pub(super) struct PushPermit {
    key: PushKey,
    keys: Keys,
}

impl PushTable {
    /// `None` if there are too many keys, or if the key is taken: then the client carries the rows.
    /// `waiting`: of the session's client.
    pub fn insert(&self, key: PushKey, jobs: mpsc::Sender<Job>, waiting: Arc<Semaphore>) -> Option<PushPermit> {
        let mut keys = lock(&self.0);
        if keys.len() >= KEYS_MAX {
            keys.retain(|_, target| !target.jobs.is_closed());
        }
        if keys.len() >= KEYS_MAX || keys.contains_key(&key) {
            return None;
        }
        keys.insert(key, Target { jobs, waiting });
        Some(PushPermit { key, keys: Arc::clone(&self.0) })
    }

    /// Those of sessions that have ended do not count.
    pub fn len(&self) -> usize {
        lock(&self.0).values().filter(|target| !target.jobs.is_closed()).count()
    }

    fn session(&self, key: &PushKey) -> Option<Target> {
        lock(&self.0).get(key).cloned()
    }
}

impl PushPermit {
    pub fn key(&self) -> PushKey {
        self.key
    }
}

impl Drop for PushPermit {
    fn drop(&mut self) {
        lock(&self.keys).remove(&self.key);
    }
}

/// Receives rows from another peer. Those of sessions that are not known are dropped: the client finds out.
pub(super) async fn serve(server: &Server, place: &StreamPlace, mut stream: BoxedStream) {
    let mut body = Vec::new();
    let ended = loop {
        let (kind, _reading) = match server.read_frame(place, &mut stream, &mut body).await {
            Ok(read) => read,
            Err(error) => break error,
        };
        match Request::decode(kind, &body) {
            Ok(Request::Push { key, run }) => {
                let Some(Target { jobs, waiting }) = server.pushes.session(&key) else { continue };
                let waiting = reserve([&server.waiting, &waiting], bytes_of(&run, &body));
                let Some(waiting) = waiting else { continue };
                let job = Job::Run { run, is_pushed: true, waiting };
                if jobs.try_send(job).is_err() {
                    debug!("rows that were passed on are dropped: their session takes no more");
                }
            }
            Ok(_) => {
                break crate::wire::WireError::Unknown { what: "the kind of a request", found: kind.into() }.into();
            }
            Err(error) => break error.into(),
        }
    };
    debug!(%ended, "a peer passes no more rows on");
}

/// Rows that wait to be passed on, and the memory that is free when they were.
type WaitingPush = (Request, WaitingPermits);

struct Link {
    messages: mpsc::Sender<WaitingPush>,
    /// Whether the stream is open.
    state: watch::Receiver<bool>,
}

/// Streams to the next peers of chains.
pub(super) struct PushLinks {
    dial: Arc<dyn Dial>,
    links: Mutex<HashMap<PeerId, Link>>,
}

impl PushLinks {
    pub fn new(dial: Arc<dyn Dial>) -> Self {
        Self { dial, links: Mutex::default() }
    }

    /// Connects to a peer, if there is no stream to it yet. Returns whether there is one now. A new one counts against `places`,
    /// those of the client that asks for it, until it ends.
    pub async fn connect(&self, client: PeerId, places: &Arc<Semaphore>, next: &Next) -> bool {
        let mut state = {
            let mut links = lock(&self.links);
            links.retain(|_, link| !link.messages.is_closed());
            match links.get(&next.peer) {
                Some(link) => link.state.clone(),
                None if links.len() >= LINKS_MAX => return false,
                None => {
                    let Ok(place) = Arc::clone(places).try_acquire_owned() else { return false };
                    let link = self.start(client, next, place);
                    links.entry(next.peer).or_insert(link).state.clone()
                }
            }
        };
        // An error means that the link has ended.
        timeout(CONNECT_TIME_MAX, state.wait_for(|is_connected| *is_connected)).await.is_ok_and(|state| state.is_ok())
    }

    pub fn len(&self) -> usize {
        lock(&self.links).values().filter(|link| !link.messages.is_closed()).count()
    }

    fn start(&self, client: PeerId, next: &Next, place: OwnedSemaphorePermit) -> Link {
        let (messages, waiting) = mpsc::channel(LINK_WAITING_MAX);
        let (connected, state) = watch::channel(false);
        let (dial, peer) = (Arc::clone(&self.dial), next.peer);
        let addresses = dialable(&next.addresses, &dial.addresses(client));
        tokio::spawn(async move {
            let _place = place;
            match dial.open(peer, &addresses, PUSH_PROTOCOL).await {
                Ok(stream) => {
                    connected.send_replace(true);
                    if let Err(error) = send_all(waiting, stream).await {
                        debug!(%peer, %error, "rows cannot be passed on any more");
                    }
                }
                Err(error) => debug!(%peer, %error, "the next peer cannot be reached"),
            }
        });
        Link { messages, state }
    }

    /// Sends rows to a peer, within `budgets`: the memory of all and that of the client. Returns whether there is a stream to the peer,
    /// and room for them to wait; otherwise the client carries them.
    pub fn send(&self, next: &Next, run: &Run, budgets: [&Arc<Semaphore>; 2]) -> bool {
        let links = lock(&self.links);
        let Some(link) = links.get(&next.peer).filter(|link| *link.state.borrow()) else { return false };
        let Ok(place) = link.messages.try_reserve() else { return false };
        // In memory as values, and then also as bytes.
        let bytes = 2 * size_of_val(run.activations.values.as_slice());
        let Some(waiting) = reserve(budgets, bytes) else { return false };
        place.send((Request::Push { key: next.key, run: run.clone() }, waiting));
        true
    }
}

async fn send_all(
    mut messages: mpsc::Receiver<WaitingPush>,
    mut to: impl AsyncWrite + Unpin,
) -> Result<(), FrameError> {
    while let Ok(Some((message, _waiting))) = timeout(IDLE, messages.recv()).await {
        let mut body = Vec::new();
        let kind = message.encode(&mut body);
        write_frame(&mut to, kind, &body).await?;
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::super::{BlockServer, WAITING_KIB_PER_PEER_MAX};
    use super::*;
    use crate::dial::Dialled;
    use crate::wire::{Activations, Encoding};

    struct Nobody;

    impl Dial for Nobody {
        fn open<'a>(&'a self, _: PeerId, _: &'a [String], _: &'static str) -> Dialled<'a> {
            Box::pin(std::future::pending())
        }

        fn addresses(&self, _: PeerId) -> Vec<String> {
            Vec::new()
        }
    }

    #[tokio::test]
    async fn rows_are_billed_to_the_client_whose_session_they_are_for() {
        let server = BlockServer::new(Arc::new(Nobody)).0;
        let [pusher, hoarder, honest] =
            [1, 2, 3].map(|number| server.places.take(PeerId::new(&[number]).unwrap()).unwrap());
        // One client has used up what it may have waiting.
        let budgets = [&server.waiting, &hoarder.waiting];
        let _all = reserve(budgets, WAITING_KIB_PER_PEER_MAX << 10).unwrap();
        let mut sessions = [&hoarder, &honest].map(|client| {
            let (jobs, received) = mpsc::channel(4);
            let key = PushKey([client.peer.as_bytes()[0]; 16]);
            (server.pushes.insert(key, jobs, Arc::clone(&client.waiting)).unwrap(), received)
        });
        let activations = Activations { encoding: Encoding::F32, rows: 1, values: vec![0.5; 256] };
        let run =
            Run { run: 1, position: 0, phase: engine::Phase::Decode, state_rows: 1, is_silent: false, activations };
        let (mut near, far) = duplex(1 << 16);
        for (permit, _) in &sessions {
            let mut body = Vec::new();
            let kind = Request::Push { key: permit.key(), run: run.clone() }.encode(&mut body);
            write_frame(&mut near, kind, &body).await.unwrap();
        }
        drop(near);
        serve(&server, &pusher, Box::new(far)).await;
        assert!(sessions[0].1.try_recv().is_err(), "the hoarder has no room");
        let job = sessions[1].1.try_recv();
        assert!(matches!(&job, Ok(Job::Run { is_pushed: true, .. })), "the other client's rows come");
        assert_eq!(pusher.waiting.available_permits(), WAITING_KIB_PER_PEER_MAX);
        assert!(honest.waiting.available_permits() < WAITING_KIB_PER_PEER_MAX);
        drop(job);
        assert_eq!(honest.waiting.available_permits(), WAITING_KIB_PER_PEER_MAX);
    }
}
