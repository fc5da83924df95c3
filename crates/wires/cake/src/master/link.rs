//! `WorkerLink`: a connection to a worker, for one sequence at a time, and the thread that talks over it. The thread connects
//! when there is work, and answers every request within the worker's timeouts.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::super::auth::CakeAuthError;
use super::super::connection::{CakeConnection, CakeConnectionError, ConnectionHandle};
use super::super::wire::{
    CakeDType, CakeMessage, CakeOp, CakeTensor, CakeVariant, CakeWireError, activation_rows, activation_tensor,
};
use super::{ANSWER_BYTES_MAX, ANSWER_TIMEOUT, CakeWorkerAddress};
use crate::layer_name::excerpt;

const STACK_BYTES: usize = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error(transparent)]
    Connection(#[from] CakeConnectionError),
    #[error("the worker reported: {0}")]
    Worker(String),
    /// Its first work failed. A running worker of cake's accepts layers without looking at them.
    #[error(
        "the worker does not run its layers ({0}): if it had others before, restart it, because it takes new ones only when it \
         starts"
    )]
    Layers(Box<LinkError>),
    #[error("the worker computes in {0:?}, which is not known here")]
    DType(String),
    #[error("the worker sent {found} rows for {expected}")]
    Rows { expected: usize, found: usize },
    #[error("the connection has {found} tokens of the sequence, not {expected}")]
    Position { expected: usize, found: usize },
    #[error("no thread for the connection")]
    Thread,
}

impl From<CakeWireError> for LinkError {
    fn from(error: CakeWireError) -> Self {
        Self::Connection(error.into())
    }
}

impl LinkError {
    /// Whether a worker that is still loading may be the reason.
    pub fn may_pass(&self) -> bool {
        use CakeConnectionError as Error;
        match self {
            Self::Connection(Error::Closed | Error::Silent(_) | Error::Io(_)) => true,
            Self::Connection(Error::Auth(error)) => matches!(error, CakeAuthError::Io(_)),
            _ => false,
        }
    }
}

/// Checks that a worker answers, and computes in a type that is known.
pub(super) fn greet(worker: &CakeWorkerAddress) -> Result<(), LinkError> {
    OpenLink::greet(worker.connect()?).map(drop)
}

pub(super) type RunReply = Result<Vec<f32>, LinkError>;

pub(super) struct WorkerLink {
    requests: Sender<Request>,
    /// Of the connection that is open.
    handle: Arc<Mutex<Option<ConnectionHandle>>>,
}

enum Request {
    Run {
        position: usize,
        rows: Vec<f32>,
        reply: Sender<RunReply>,
    },
    /// The sequence has ended: the worker forgets it.
    Reset,
}

impl WorkerLink {
    pub fn start(worker: CakeWorkerAddress, hidden: usize) -> Result<Self, LinkError> {
        let (requests, received) = channel();
        let handle = Arc::default();
        let thread = LinkThread { worker, hidden, handle: Arc::clone(&handle), open: None, has_answered: false };
        let builder = thread::Builder::new().name("consort-cake".to_owned()).stack_size(STACK_BYTES);
        builder.spawn(move || thread.run(&received)).map_err(|_| LinkError::Thread)?;
        Ok(Self { requests, handle })
    }

    /// Sends activations `[rows, hidden]` from `position` on through the layers. The receiver gets those after them, or an
    /// error.
    pub fn run(&self, position: usize, rows: Vec<f32>) -> Receiver<RunReply> {
        let (reply, result) = channel();
        // If the thread has ended, the receiver sees it.
        let _ = self.requests.send(Request::Run { position, rows, reply });
        result
    }

    /// Begins a new sequence.
    pub fn reset(&self) {
        // If the thread has ended, the next run fails.
        let _ = self.requests.send(Request::Reset);
    }

    /// Whether the worker has closed the connection.
    pub fn is_hung_up(&self) -> bool {
        self.lock().as_ref().is_some_and(ConnectionHandle::is_hung_up)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<ConnectionHandle>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WorkerLink {
    /// The thread may wait for an answer: closing the connection ends that.
    fn drop(&mut self) {
        self.lock().iter().for_each(ConnectionHandle::shutdown);
    }
}

struct LinkThread {
    worker: CakeWorkerAddress,
    hidden: usize,
    handle: Arc<Mutex<Option<ConnectionHandle>>>,
    open: Option<OpenLink>,
    /// It has run its layers once.
    has_answered: bool,
}

struct OpenLink {
    connection: CakeConnection,
    dtype: CakeDType,
    /// Tokens that were sent of its sequence.
    computed: usize,
}

impl LinkThread {
    fn run(mut self, requests: &Receiver<Request>) {
        for request in requests {
            match request {
                Request::Run { position, rows, reply } => {
                    let result = self.forward(position, &rows).map_err(|error| match error {
                        LinkError::Worker(_) | LinkError::Connection(CakeConnectionError::Closed)
                            if !self.has_answered =>
                        {
                            LinkError::Layers(Box::new(error))
                        }
                        error => error,
                    });
                    self.has_answered |= result.is_ok();
                    if result.is_err() {
                        self.close();
                    }
                    // Whoever waited may be gone, so the error is ignored.
                    let _ = reply.send(result);
                }
                Request::Reset => self.reset(),
            }
        }
    }

    fn close(&mut self) {
        self.open = None;
        *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// A new connection has no sequence, so one that cannot be reset is replaced.
    fn reset(&mut self) {
        let is_reset = self.open.as_mut().is_none_or(|open| open.computed == 0 || open.say_goodbye().is_ok());
        if !is_reset {
            self.close();
        }
    }

    fn forward(&mut self, position: usize, rows: &[f32]) -> RunReply {
        let hidden = self.hidden;
        let open = match &mut self.open {
            Some(open) => open,
            None => {
                let connection = self.worker.connect()?;
                let handle = connection.handle().map_err(CakeConnectionError::from)?;
                *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
                self.open.insert(OpenLink::greet(connection)?)
            }
        };
        // A connection that failed has lost the beginning of the sequence.
        if open.computed != position {
            return Err(LinkError::Position { expected: position, found: open.computed });
        }
        open.computed += rows.len() / hidden;
        let worker = &self.worker;
        let names: Vec<String> = worker.layers.iter().map(|layer| worker.prefix.name(layer)).collect();
        let ops = worker.layers.iter().zip(&names);
        let ops = ops.map(|(layer, name)| CakeOp { layer: name, position: position as u64, block: layer as u64 });
        let ops: Vec<_> = ops.collect();
        activation_tensor(rows, hidden, open.dtype, |x: CakeTensor<'_>| {
            open.connection.send(&CakeMessage::Batch { x, ops }, CakeVariant::Head)
        })??;
        let bytes_max = size_of_val(rows) + ANSWER_BYTES_MAX;
        let payload = open.connection.receive(bytes_max, Some(worker.step_timeout))?;
        match payload.message(CakeVariant::Head)? {
            CakeMessage::Tensor(tensor) => {
                let found = activation_rows(&tensor, hidden)?;
                let (expected, found_rows) = (rows.len() / hidden, found.len() / hidden);
                if expected != found_rows {
                    return Err(LinkError::Rows { expected, found: found_rows });
                }
                Ok(found)
            }
            CakeMessage::WorkerError { message } => Err(LinkError::Worker(excerpt(message))),
            _ => Err(CakeConnectionError::Unexpected.into()),
        }
    }
}

impl OpenLink {
    fn greet(connection: CakeConnection) -> Result<Self, LinkError> {
        connection.send(&CakeMessage::Hello, CakeVariant::Head)?;
        let dtype = read_info(&connection)?;
        Ok(Self { connection, dtype, computed: 0 })
    }

    fn say_goodbye(&mut self) -> Result<(), LinkError> {
        self.connection.send(&CakeMessage::Goodbye, CakeVariant::Head)?;
        self.dtype = read_info(&self.connection)?;
        self.computed = 0;
        Ok(())
    }
}

/// The type of the activations that a worker computes with.
fn read_info(connection: &CakeConnection) -> Result<CakeDType, LinkError> {
    let payload = connection.receive(ANSWER_BYTES_MAX, Some(ANSWER_TIMEOUT))?;
    let CakeMessage::WorkerInfo(info) = payload.message(CakeVariant::Head)? else {
        return Err(CakeConnectionError::Unexpected.into());
    };
    CakeDType::named(info.dtype)
        .filter(|dtype| matches!(dtype, CakeDType::F16 | CakeDType::Bf16 | CakeDType::F32))
        .ok_or_else(|| LinkError::DType(excerpt(info.dtype)))
}
