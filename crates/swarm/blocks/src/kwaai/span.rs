//! `KwaaiSpan`: a block server of KwaaiNet as a span of a chain. It runs all of its blocks, from its own first one.
//!
//! A call is a frame there and a frame back, on a stream of its own. The server appends whatever comes to the session, so a call
//! is sent again only if it has certainly not run. After any other failure, and to go back, the rows from position 0 have to be
//! replayed; that begins a fresh session.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use directory::PeerId;
use kwaai::{
    CallId, DataForm, FRAME_BYTES_MAX, INFERENCE_PROTOCOL, KwaaiFailure, KwaaiInput, KwaaiReply, KwaaiRequest,
    KwaaiTensor, KwaaiWireError, call_frame, local_frame, read_reply, rows_per_frame,
};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use types::LayerRange;

use super::frames::{FrameForm, KwaaiStreamError, read_header, read_payload, write_frame};
use super::random_bytes;
use crate::block::{BlockRows, BlockStates};
use crate::dial::{ByteStream, Dial};

/// How long a connection to the local TCP bypass may take.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// What a reply has beside its values: names, or the text of a failure.
const REPLY_OVERHEAD_BYTES_MAX: usize = 64 << 10;

/// How a block server is reached.
#[derive(Clone)]
pub enum KwaaiRoute {
    Peer {
        peer: PeerId,
        addresses: Vec<String>,
        dial: Arc<dyn Dial>,
    },
    /// Its local TCP bypass, where a call is a connection.
    Local(SocketAddr),
}

/// What the server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KwaaiSpanShape {
    pub layers: LayerRange,
    /// Values of one row.
    pub hidden: usize,
    pub output: KwaaiSpanOutput,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KwaaiSpanOutput {
    /// The hidden states of all rows.
    States,
    /// A server with the last layer: the logits of the last row, instead of its states.
    Logits { vocab: usize },
}

#[derive(Clone, Copy, Debug)]
pub struct KwaaiSpanLimits {
    /// For one call. The server gives up after 30 seconds itself.
    pub call_timeout: Duration,
    /// How long a server may be warming up, or have no room, until the span fails. Then others are tried, or it again.
    pub retry_max: Duration,
    /// The first wait before a call is sent again; each further one is twice as long, up to the last.
    pub retry_first: Duration,
    pub retry_last: Duration,
}

impl Default for KwaaiSpanLimits {
    fn default() -> Self {
        Self {
            call_timeout: Duration::from_secs(35),
            retry_max: Duration::from_secs(2),
            retry_first: Duration::from_millis(250),
            retry_last: Duration::from_secs(1),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SpanError {
    /// Nobody is to blame. The caller runs all rows from position 0 on again.
    #[error(
        "rows begin at position {position}; this session has {computed} and can only be continued there or begun again"
    )]
    Replay { position: usize, computed: usize },
    #[error("{rows} rows of states were requested; this server gives {max}")]
    Output { rows: usize, max: usize },
    #[error("{found} values are not one or more rows of {hidden}, of which {state_rows} are returned")]
    Shape { found: usize, hidden: usize, state_rows: usize },
    #[error("rows of {hidden} values do not fit into KwaaiNet's frames or into f16: {source}")]
    Unsendable { hidden: usize, source: KwaaiWireError },
    #[error("it is not ready: {0}")]
    NotReady(KwaaiFailure),
    #[error("it did not compute: {0}")]
    Failed(KwaaiFailure),
    #[error("it could not be reached")]
    Unreachable(#[source] io::Error),
    #[error("it gave no answer within {0:?}")]
    TimedOut(Duration),
    #[error("the connection to the server broke")]
    Broken(#[source] KwaaiStreamError),
    #[error("the server answered nonsense: {0}")]
    Nonsense(#[source] KwaaiWireError),
}

impl SpanError {
    /// Whether the same server may do it later, with a replay from position 0.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Replay { .. } | Self::NotReady(_))
    }

    /// Whether the server did what no honest server does.
    pub fn is_misbehaviour(&self) -> bool {
        matches!(self, Self::Nonsense(_) | Self::Broken(KwaaiStreamError::Wire(_)))
    }
}

pub struct KwaaiSpan {
    route: KwaaiRoute,
    shape: KwaaiSpanShape,
    limits: KwaaiSpanLimits,
    /// Rows of one call, so that it and its reply fit into frames.
    rows_max: usize,
    session: Option<OpenSession>,
}

#[derive(Clone, Copy)]
struct OpenSession {
    /// Nobody can guess it: a server of KwaaiNet gives a session to whoever knows its id.
    id: u64,
    computed: usize,
}

impl KwaaiSpan {
    pub fn new(route: KwaaiRoute, shape: KwaaiSpanShape, limits: KwaaiSpanLimits) -> Self {
        // Its reply has as many rows, with an integer for each byte.
        let form = match shape.output {
            KwaaiSpanOutput::States => DataForm::Integers,
            KwaaiSpanOutput::Logits { .. } => DataForm::Bin,
        };
        let rows_max = rows_per_frame(shape.hidden, form);
        Self { route, shape, limits, rows_max, session: None }
    }

    pub fn shape(&self) -> KwaaiSpanShape {
        self.shape
    }

    /// Runs rows: at position 0 in a fresh session, else from where the last ones ended. With [`KwaaiSpanOutput::Logits`] the
    /// result has the logits of the last row as its states. After an error the session is gone.
    pub async fn run(&mut self, rows: BlockRows) -> Result<BlockStates, SpanError> {
        let started = Instant::now();
        let session = self.session.take();
        let (hidden, count) = (self.shape.hidden, rows.activations.len() / self.shape.hidden.max(1));
        let (found, state_rows) = (rows.activations.len(), rows.state_rows);
        if count == 0 || found != count * hidden || state_rows > count {
            return Err(SpanError::Shape { found, hidden, state_rows });
        }
        if matches!(self.shape.output, KwaaiSpanOutput::Logits { .. }) && state_rows > 1 {
            return Err(SpanError::Output { rows: state_rows, max: 1 });
        }
        if self.rows_max == 0 {
            let source = KwaaiWireError::FrameTooLong { bytes: 2 * hidden as u64, max: FRAME_BYTES_MAX };
            return Err(SpanError::Unsendable { hidden, source });
        }
        let mut session = match session {
            _ if rows.position == 0 => OpenSession { id: u64::from_le_bytes(random_bytes()), computed: 0 },
            Some(session) if session.computed == rows.position => session,
            other => {
                let computed = other.map_or(0, |session| session.computed);
                return Err(SpanError::Replay { position: rows.position, computed });
            }
        };
        let mut states = Vec::new();
        for part in rows.activations.chunks(self.rows_max * hidden) {
            states.extend(self.call(&session, part).await?);
            session.computed += part.len() / hidden;
        }
        let width = match self.shape.output {
            KwaaiSpanOutput::States => hidden,
            KwaaiSpanOutput::Logits { vocab } => vocab,
        };
        states.drain(..states.len() - state_rows * width);
        self.session = Some(session);
        // The server does not say how long it computed and how long the call waited.
        Ok(BlockStates { states, compute: started.elapsed(), queued: Duration::ZERO })
    }

    /// Sends a call until it has run, or has failed otherwise than for want of room.
    async fn call(&self, session: &OpenSession, rows: &[f32]) -> Result<Vec<f32>, SpanError> {
        let hidden = self.shape.hidden;
        let unsendable = |source| SpanError::Unsendable { hidden, source };
        let tensor = KwaaiTensor::of_rows(rows, hidden as u32).map_err(unsendable)?;
        let position =
            u32::try_from(session.computed).map_err(|_| unsendable(KwaaiWireError::OutOfRange("position")))?;
        let request = KwaaiRequest { session: session.id, position, input: KwaaiInput::HiddenStates(tensor) };
        let give_up = Instant::now() + self.limits.retry_max;
        let mut wait = self.limits.retry_first;
        loop {
            let limit = self.limits.call_timeout;
            let (payload, call) = match timeout(limit, self.exchange(&request)).await {
                Err(_) => return Err(SpanError::TimedOut(limit)),
                Ok(exchanged) => exchanged?,
            };
            let reply = match call {
                Some(call) => read_reply(&payload, call),
                None => KwaaiReply::decode(&payload),
            };
            let failure = match self.values(reply.map_err(SpanError::Nonsense)?, session.id, rows.len())? {
                Ok(values) => return Ok(values),
                Err(failure) => failure,
            };
            if !failure.is_retryable() {
                return Err(SpanError::Failed(failure));
            }
            if Instant::now() + wait > give_up {
                return Err(SpanError::NotReady(failure));
            }
            sleep(wait).await;
            wait = (wait * 2).min(self.limits.retry_last);
        }
    }

    /// One call on a stream of its own: the payload of its reply, and which call the reply has to name.
    async fn exchange(&self, request: &KwaaiRequest<'_>) -> Result<(Vec<u8>, Option<CallId>), SpanError> {
        let unsendable = |source| SpanError::Unsendable { hidden: self.shape.hidden, source };
        let max = self.reply_bytes_max();
        match &self.route {
            KwaaiRoute::Peer { peer, addresses, dial } => {
                let dialled = dial.open(*peer, addresses, INFERENCE_PROTOCOL).await;
                let mut stream = dialled.map_err(|error| SpanError::Unreachable(io::Error::other(error)))?;
                let call = CallId(random_bytes());
                let frame = call_frame(call, peer.as_bytes(), request).map_err(unsendable)?;
                Ok((exchange(&mut stream, FrameForm::Enveloped, &frame, max).await?, Some(call)))
            }
            KwaaiRoute::Local(address) => {
                let connected = timeout(CONNECT_TIME_MAX, TcpStream::connect(address)).await;
                let connected = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
                let mut stream = connected.map_err(SpanError::Unreachable)?;
                stream.set_nodelay(true).map_err(SpanError::Unreachable)?;
                let frame = local_frame(&request.encode()).map_err(unsendable)?;
                Ok((exchange(&mut stream, FrameForm::Local, &frame, max).await?, None))
            }
        }
    }

    /// Replies are not longer, with an integer of two bytes for each byte.
    fn reply_bytes_max(&self) -> usize {
        let values = match self.shape.output {
            KwaaiSpanOutput::States => self.rows_max.saturating_mul(self.shape.hidden),
            KwaaiSpanOutput::Logits { vocab } => vocab,
        };
        values.saturating_mul(4).saturating_add(REPLY_OVERHEAD_BYTES_MAX)
    }

    /// The values of a reply to a call with `sent` values, which have to be those that were asked for.
    fn values(
        &self,
        reply: KwaaiReply<'_>,
        session: u64,
        sent: usize,
    ) -> Result<Result<Vec<f32>, KwaaiFailure>, SpanError> {
        let (of, values) = match (reply, self.shape.output) {
            (KwaaiReply::Failed(failure), _) => return Ok(Err(failure)),
            (KwaaiReply::HiddenStates { session, tensor }, KwaaiSpanOutput::States) => {
                let values = tensor.hidden_rows(self.shape.hidden).map_err(SpanError::Nonsense)?;
                if values.len() != sent {
                    let [expected, found] = [sent, values.len()].map(|values| values / self.shape.hidden);
                    return Err(SpanError::Nonsense(KwaaiWireError::Count { what: "rows", found, expected }));
                }
                (session, values)
            }
            (KwaaiReply::Logits { session, tensor }, KwaaiSpanOutput::Logits { vocab }) => {
                (session, tensor.last_logits(vocab).map_err(SpanError::Nonsense)?)
            }
            _ => return Err(SpanError::Nonsense(KwaaiWireError::UnknownKind("response type"))),
        };
        if of != session {
            return Err(SpanError::Nonsense(KwaaiWireError::OtherCall));
        }
        Ok(Ok(values))
    }
}

async fn exchange(
    stream: &mut impl ByteStream,
    form: FrameForm,
    frame: &[u8],
    max: usize,
) -> Result<Vec<u8>, SpanError> {
    let exchange = async {
        write_frame(stream, frame).await?;
        let bytes = read_header(stream, form, max).await?;
        read_payload(stream, bytes).await
    };
    exchange.await.map_err(SpanError::Broken)
}
