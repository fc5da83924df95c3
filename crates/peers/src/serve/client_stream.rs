//! The stream of one client: requests in, replies out.

use std::collections::HashMap;
use std::sync::Arc;

use swarm::PeerId;
use tokio::io::{AsyncRead, AsyncWrite, split};
use tokio::sync::{Semaphore, mpsc};
use tracing::debug;

use super::push::PushPermit;
use super::session::{self, Job, SessionContext};
use super::{STREAM_WAITING_KIB_MAX, Server};
use crate::dial::BoxedStream;
use crate::wire::{FailureKind, FrameError, Reply, Request, read_frame, write_frame};

/// Runs of one session that wait.
pub(super) const RUNS_WAITING_MAX: usize = 64;
/// Replies that wait to be sent.
const REPLIES_WAITING_MAX: usize = 8;
/// Sessions of one stream, also those that are being opened.
const SESSIONS_MAX: usize = 256;

struct Session {
    jobs: mpsc::Sender<Job>,
    /// Held while others may pass rows on to the session.
    _accepts: Option<PushPermit>,
}

pub(super) async fn serve(server: &Arc<Server>, peer: PeerId, stream: BoxedStream) {
    let (from, to) = split(stream);
    let (replies, waiting) = mpsc::channel(REPLIES_WAITING_MAX);
    // When either side ends, the other is dropped, and with it all sessions.
    let ended = tokio::select! {
        ended = receive(server, peer, from, replies) => ended,
        ended = send(waiting, to) => ended,
    };
    match ended {
        Ok(()) | Err(FrameError::Closed) => debug!(%peer, "a client left"),
        Err(error) => debug!(%peer, %error, "the stream of a client ended"),
    }
}

async fn send(mut replies: mpsc::Receiver<Reply>, mut to: impl AsyncWrite + Unpin) -> Result<(), FrameError> {
    let mut body = Vec::new();
    while let Some(reply) = replies.recv().await {
        let kind = reply.encode(&mut body);
        write_frame(&mut to, kind, &body).await?;
    }
    Ok(())
}

async fn receive(
    server: &Arc<Server>,
    peer: PeerId,
    mut from: impl AsyncRead + Unpin,
    replies: mpsc::Sender<Reply>,
) -> Result<(), FrameError> {
    let own_waiting = Arc::new(Semaphore::new(STREAM_WAITING_KIB_MAX));
    let mut sessions: HashMap<u64, Session> = HashMap::new();
    let mut body = Vec::new();
    loop {
        let kind = read_frame(&mut from, server.body_bytes_max(), &mut body).await?;
        let failed = match Request::decode(kind, &body)? {
            Request::Open(open) => {
                sessions.retain(|_, session| !session.jobs.is_closed());
                let number = open.session;
                if sessions.contains_key(&number) {
                    Some((number, FailureKind::Misuse, "the session is open already"))
                } else if sessions.len() >= SESSIONS_MAX {
                    Some((number, FailureKind::Refused, "the stream has too many sessions"))
                } else {
                    let (jobs, received) = mpsc::channel(RUNS_WAITING_MAX);
                    let accepts = open.accepts.and_then(|key| server.pushes.insert(key, jobs.clone()));
                    let context = SessionContext { server: Arc::clone(server), peer, replies: replies.clone() };
                    tokio::spawn(session::run(context, open, received));
                    sessions.insert(number, Session { jobs, _accepts: accepts });
                    None
                }
            }
            Request::Run { session, run } => {
                let permits = [&own_waiting, &server.waiting].map(|budget| kib_of(budget, body.len()));
                match (sessions.get(&session).map(|own| own.jobs.clone()), permits) {
                    (None, _) => Some((session, FailureKind::Ended, "the session is not open")),
                    (Some(_), [None, _] | [_, None]) => {
                        sessions.remove(&session);
                        Some((session, FailureKind::Refused, "too much waits to be run"))
                    }
                    (Some(jobs), [Some(own_kib), Some(all_kib)]) => {
                        let job = Job::Run { run, is_pushed: false, _waiting: [Some(own_kib), Some(all_kib)] };
                        send_job(&mut sessions, session, jobs, job)
                    }
                }
            }
            Request::Route { session, accepts, next } => match sessions.get_mut(&session) {
                Some(own) => {
                    own._accepts = accepts.and_then(|key| server.pushes.insert(key, own.jobs.clone()));
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
                let _ = replies.send(Reply::Pong { number }).await;
                None
            }
            Request::Push { .. } => {
                let unknown = crate::wire::WireError::Unknown { what: "the kind of a request", found: kind.into() };
                return Err(unknown.into());
            }
        };
        if let Some((session, kind, why)) = failed {
            let _ = replies.send(Reply::Failed { session, kind, why: why.to_owned() }).await;
        }
    }
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

/// Memory for a message that waits; `None` if there is not enough.
pub(super) fn kib_of(budget: &Arc<Semaphore>, bytes: usize) -> Option<tokio::sync::OwnedSemaphorePermit> {
    let kib = u32::try_from(bytes.div_ceil(1024)).ok()?;
    Arc::clone(budget).try_acquire_many_owned(kib).ok()
}
