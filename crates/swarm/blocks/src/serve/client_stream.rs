//! The stream of one client: requests in, replies out.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, split};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tracing::debug;

use super::Server;
use super::account::{StreamPlace, WaitingPermits, reserve};
use super::push::PushPermit;
use super::session::{self, Job, SessionContext};
use crate::dial::BoxedStream;
use crate::wire::{FailureKind, FrameError, PushKey, Reply, Request, Run, write_frame};

/// Runs of one session that wait.
pub const RUNS_WAITING_MAX: usize = 64;
/// Replies that wait to be sent.
const REPLIES_WAITING_MAX: usize = 8;
/// Sessions of one stream, also those that are being opened.
pub const SESSIONS_PER_STREAM_MAX: usize = 256;

/// A reply that waits to be sent, and the memory that is free when it was.
pub(super) type WaitingReply = (Reply, WaitingPermits);

struct Session {
    jobs: mpsc::Sender<Job>,
    /// Held while others may pass rows on to the session.
    accepts: Option<PushPermit>,
    task: JoinHandle<()>,
}

impl Session {
    fn set_accepts(&mut self, server: &Server, waiting: &Arc<Semaphore>, key: Option<PushKey>) {
        // A key that it has already stays, also while it is told again.
        if self.accepts.as_ref().map(PushPermit::key) != key {
            self.accepts = key.and_then(|key| server.pushes.insert(key, self.jobs.clone(), Arc::clone(waiting)));
        }
    }
}

impl Drop for Session {
    /// What waits is not run any more.
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) async fn serve(server: &Arc<Server>, place: &StreamPlace, stream: BoxedStream) {
    let peer = place.peer;
    let (from, to) = split(stream);
    let (replies, waiting) = mpsc::channel(REPLIES_WAITING_MAX);
    // When either side ends, the other is dropped, and with it all sessions.
    let ended = tokio::select! {
        ended = receive(server, place, from, replies) => ended,
        ended = send(waiting, to) => ended,
    };
    match ended {
        Ok(()) | Err(FrameError::Closed) => debug!(%peer, "a client left"),
        Err(error) => debug!(%peer, %error, "the stream of a client ended"),
    }
}

async fn send(mut replies: mpsc::Receiver<WaitingReply>, mut to: impl AsyncWrite + Unpin) -> Result<(), FrameError> {
    while let Some((reply, _waiting)) = replies.recv().await {
        let mut body = Vec::new();
        let kind = reply.encode(&mut body);
        write_frame(&mut to, kind, &body).await?;
    }
    Ok(())
}

async fn receive(
    server: &Arc<Server>,
    place: &StreamPlace,
    mut from: impl AsyncRead + Unpin,
    replies: mpsc::Sender<WaitingReply>,
) -> Result<(), FrameError> {
    let mut sessions: HashMap<u64, Session> = HashMap::new();
    let mut body = Vec::new();
    loop {
        let (kind, _reading) = server.read_frame(place, &mut from, &mut body).await?;
        let failed = match Request::decode(kind, &body)? {
            Request::Open(open) => {
                sessions.retain(|_, session| !session.task.is_finished());
                let number = open.session;
                if sessions.contains_key(&number) {
                    Some((number, FailureKind::Misuse, "the session is open already"))
                } else if sessions.len() >= SESSIONS_PER_STREAM_MAX {
                    Some((number, FailureKind::Refused, "the stream has too many sessions"))
                } else {
                    let (jobs, received) = mpsc::channel(RUNS_WAITING_MAX);
                    let waiting = Arc::clone(&place.waiting);
                    let accept = |key| server.pushes.insert(key, jobs.clone(), Arc::clone(&waiting));
                    let accepts = open.accepts.and_then(accept);
                    let (links, replies) = (Arc::clone(&place.links), replies.clone());
                    let (server, peer) = (Arc::clone(server), place.peer);
                    let context = SessionContext { server, peer, links, waiting, replies };
                    let task = tokio::spawn(session::run(context, open, received));
                    sessions.insert(number, Session { jobs, accepts, task });
                    None
                }
            }
            Request::Run { session, run } => {
                let waiting = reserve([&server.waiting, &place.waiting], bytes_of(&run, &body));
                match (sessions.get(&session).map(|own| own.jobs.clone()), waiting) {
                    (None, _) => Some((session, FailureKind::Ended, "the session is not open")),
                    (Some(_), None) => {
                        sessions.remove(&session);
                        Some((session, FailureKind::Refused, "too much waits to be run"))
                    }
                    (Some(jobs), Some(waiting)) => {
                        send_job(&mut sessions, session, jobs, Job::Run { run, is_pushed: false, waiting })
                    }
                }
            }
            Request::Route { session, accepts, next } => match sessions.get_mut(&session) {
                Some(own) => {
                    own.set_accepts(server, &place.waiting, accepts);
                    let jobs = own.jobs.clone();
                    send_job(&mut sessions, session, jobs, Job::Route { next })
                }
                None => Some((session, FailureKind::Ended, "the session is not open")),
            },
            Request::Close { session } => {
                sessions.remove(&session);
                None
            }
            Request::Ping { number } => {
                // A client that does not read its replies waits.
                let _ = replies.send((Reply::Pong { number }, [None, None])).await;
                None
            }
            Request::Push { .. } => {
                let unknown = crate::wire::WireError::Unknown { what: "the kind of a request", found: kind.into() };
                return Err(unknown.into());
            }
        };
        if let Some((session, kind, why)) = failed {
            let _ = replies.send((Reply::Failed { session, kind, why: why.to_owned() }, [None, None])).await;
        }
    }
}

/// What a run takes in memory while it waits: values may come in half the bytes.
pub(super) fn bytes_of(run: &Run, body: &[u8]) -> usize {
    body.len().max(size_of_val(run.activations.values.as_slice()))
}

type Failed = Option<(u64, FailureKind, &'static str)>;

fn send_job(sessions: &mut HashMap<u64, Session>, session: u64, jobs: mpsc::Sender<Job>, job: Job) -> Failed {
    match jobs.try_send(job) {
        Ok(()) => None,
        Err(error) => {
            sessions.remove(&session);
            Some(match error {
                mpsc::error::TrySendError::Full(_) => (session, FailureKind::Refused, "too many runs wait"),
                mpsc::error::TrySendError::Closed(_) => (session, FailureKind::Ended, "the session has ended"),
            })
        }
    }
}
