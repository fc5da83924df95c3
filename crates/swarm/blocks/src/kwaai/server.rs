//! `KwaaiServer`: answers the calls of KwaaiNet's coordinators with a block. A call has tokens or hidden states; its reply has
//! hidden states, or, from a block with the last layer, the logits of the last position.
//!
//! A call says at which position its rows begin. What the session had from there on is discarded, so a call that is sent again
//! after a lost reply changes nothing; a gap is refused. (KwaaiNet's own servers append the rows again.)

use std::sync::Arc;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use engine::{EmbeddingAndHead, ExecutorError, Phase};
use kernels::Backend;
use kwaai::{
    CallId, DataForm, FRAME_BYTES_MAX, KwaaiFailure, KwaaiInput, KwaaiReply, KwaaiRequest, KwaaiTensor, KwaaiWireError,
    LOCAL_FRAME_BYTES_MAX, local_frame, read_call, reply_frame, rows_per_frame,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use types::TokenId;

use super::calls::{Admission, CallLimits, CallPlace, Calls};
use super::frames::{FrameForm, KwaaiStreamError, read_header, read_payload, write_frame};
use super::sessions::{SessionName, Sessions, run_failure};
use crate::block::{BlockHandle, BlockRows, BlockSession, BlockShape, Client, RunError};

/// What a server keeps within.
#[derive(Clone, Copy, Debug)]
pub struct KwaaiLimits {
    pub calls: CallLimits,
    /// For reading a call and running it, and again for writing the reply.
    pub call_budget: Duration,
}

impl Default for KwaaiLimits {
    fn default() -> Self {
        Self {
            calls: CallLimits::default(),
            // KwaaiNet's own.
            call_budget: Duration::from_secs(30),
        }
    }
}

/// The parts of a model outside its layers. They run on a thread for blocking work, one call at a time.
pub trait EmbedAndHead: Send {
    /// `[tokens, hidden]`.
    fn embed(&mut self, tokens: &[TokenId]) -> Result<Vec<f32>, ExecutorError>;
    /// `[rows, vocab]` of states `[rows, hidden]`.
    fn logits(&mut self, states: &[f32]) -> Result<Vec<f32>, ExecutorError>;
}

impl<B: Backend> EmbedAndHead for EmbeddingAndHead<B>
where
    Self: Send,
{
    fn embed(&mut self, tokens: &[TokenId]) -> Result<Vec<f32>, ExecutorError> {
        Self::embed(self, tokens)
    }

    fn logits(&mut self, states: &[f32]) -> Result<Vec<f32>, ExecutorError> {
        Self::logits(self, states)
    }
}

/// Clones serve the same block, with the same sessions.
#[derive(Clone)]
pub struct KwaaiServer(Arc<Inner>);

struct Inner {
    block: BlockHandle,
    /// Of the whole model.
    layers: usize,
    embed_and_head: OnceLock<Arc<Mutex<dyn EmbedAndHead>>>,
    sessions: Sessions,
    calls: Calls,
    limits: KwaaiLimits,
}

impl KwaaiServer {
    /// `layers`: of the whole model.
    pub fn new(block: BlockHandle, layers: usize, limits: KwaaiLimits) -> Self {
        let sessions = Sessions::new(block.clone());
        let (embed_and_head, calls) = (OnceLock::new(), Calls::new(limits.calls));
        Self(Arc::new(Inner { block, layers, embed_and_head, sessions, calls, limits }))
    }

    /// Until this is called, calls that need them are told that the node is warming up. The first call decides.
    pub fn set_embed_and_head(&self, embed_and_head: impl EmbedAndHead + 'static) {
        self.0.embed_and_head.get_or_init(|| Arc::new(Mutex::new(embed_and_head)));
    }

    /// Answers the one call of a stream of [`kwaai::INFERENCE_PROTOCOL`]. An error means that there was no answer.
    pub async fn serve_stream(
        &self,
        client: Client,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    ) -> Result<(), KwaaiStreamError> {
        self.0.serve(client, FrameForm::Enveloped, stream).await
    }

    /// The same for a connection of the local TCP bypass.
    pub(super) async fn serve_local_connection(
        &self,
        client: Client,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    ) -> Result<(), KwaaiStreamError> {
        self.0.serve(client, FrameForm::Local, stream).await
    }
}

impl Inner {
    async fn serve(
        &self,
        client: Client,
        form: FrameForm,
        mut stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    ) -> Result<(), KwaaiStreamError> {
        let deadline = Instant::now() + self.limits.call_budget;
        let frame = match self.calls.enter(client) {
            Admission::Run(place) => self.run(place, client, form, &mut stream, deadline).await?,
            Admission::Refuse(place) => {
                let frame = timeout_at(deadline, refuse(form, &mut stream)).await;
                drop(place);
                frame.map_err(|_| KwaaiStreamError::TooSlow)??
            }
            Admission::Drop => return Err(KwaaiStreamError::TooManyCalls),
        };
        let write = async {
            write_frame(&mut stream, &frame).await?;
            Ok(stream.shutdown().await?)
        };
        timeout(self.limits.call_budget, write).await.map_err(|_| KwaaiStreamError::TooSlow)?
    }

    /// Reads a call and runs it. Returns the frame of its reply.
    async fn run(
        &self,
        place: CallPlace<'_>,
        client: Client,
        form: FrameForm,
        stream: &mut (impl AsyncRead + Unpin),
        deadline: Instant,
    ) -> Result<Vec<u8>, KwaaiStreamError> {
        let read = async {
            let max = if form == FrameForm::Local { LOCAL_FRAME_BYTES_MAX } else { FRAME_BYTES_MAX };
            let bytes = read_header(stream, form, max).await?;
            let permits = place.frame(bytes).await;
            Ok::<_, KwaaiStreamError>((read_payload(stream, bytes).await?, permits))
        };
        let (payload, _permits) = timeout_at(deadline, read).await.map_err(|_| KwaaiStreamError::TooSlow)??;
        match form {
            FrameForm::Enveloped => {
                let (call, request) = read_call(&payload)?;
                Ok(reply_frame(call, &self.reply(client, request, form, deadline).await)?)
            }
            FrameForm::Local => {
                let reply = self.reply(client, KwaaiRequest::decode(&payload), form, deadline).await;
                Ok(local_frame(&reply.encode())?)
            }
        }
    }

    async fn reply(
        &self,
        client: Client,
        request: Result<KwaaiRequest<'_>, KwaaiWireError>,
        form: FrameForm,
        deadline: Instant,
    ) -> KwaaiReply<'static> {
        let answer = async { self.answer(client, request.map_err(refused)?, form).await };
        let answer = timeout_at(deadline, answer).await.unwrap_or(Err(KwaaiFailure::TimedOut));
        answer.unwrap_or_else(KwaaiReply::Failed)
    }

    async fn answer(
        &self,
        client: Client,
        request: KwaaiRequest<'_>,
        form: FrameForm,
    ) -> Result<KwaaiReply<'static>, KwaaiFailure> {
        let loading = |what: &str| KwaaiFailure::WarmingUp(format!(": {what} loading"));
        let shape = self.block.shape().ok_or_else(|| loading("the weights of the block are"))?;
        let is_last = shape.layers.end() == self.layers;
        let has_tokens = matches!(request.input, KwaaiInput::Tokens(_));
        if has_tokens && shape.layers.start() > 0 {
            return Err(KwaaiFailure::not_first(shape.layers.start() as u32));
        }
        let embed_and_head = match self.embed_and_head.get() {
            None if has_tokens || is_last => return Err(loading("embedding and head are")),
            found => found,
        };
        let position = request.position as usize;
        self.check(&request, &shape, is_last, form)?;
        // Checked before a session begins for it.
        let input = match request.input {
            KwaaiInput::HiddenStates(tensor) => Input::Activations(tensor.hidden_rows(shape.hidden).map_err(refused)?),
            KwaaiInput::Tokens(tokens) => Input::Tokens(tokens),
        };
        let name = SessionName { client, id: request.session };
        let activations = match input {
            Input::Activations(activations) => activations,
            Input::Tokens(tokens) => blocking(embed_and_head, move |parts| parts.embed(&tokens)).await?,
        };
        let mut session = self.sessions.enter(name, position, &shape).await?;
        // `enter` opens it.
        let Some(open) = session.as_mut() else { return Err(KwaaiFailure::AtCapacity) };
        let states = run_rows(open, &shape, position, &activations, is_last).await.map_err(|error| {
            let failure = run_failure(&error);
            if !error.is_misuse() && failure != KwaaiFailure::AtCapacity {
                self.sessions.forget(name);
            }
            failure
        })?;
        drop(session);
        if !is_last {
            let tensor = KwaaiTensor::of_rows(&states, shape.hidden as u32).map_err(refused)?;
            return Ok(KwaaiReply::HiddenStates { session: request.session, tensor });
        }
        let logits = blocking(embed_and_head, move |parts| parts.logits(&states)).await?;
        let tensor = KwaaiTensor::of_rows(&logits, logits.len() as u32).map_err(refused)?;
        Ok(KwaaiReply::Logits { session: request.session, tensor })
    }

    /// Refuses a call that would be too long for the session, or its reply for a frame.
    fn check(
        &self,
        request: &KwaaiRequest<'_>,
        shape: &BlockShape,
        is_last: bool,
        form: FrameForm,
    ) -> Result<(), KwaaiFailure> {
        let rows = match &request.input {
            KwaaiInput::Tokens(tokens) => tokens.len(),
            KwaaiInput::HiddenStates(tensor) => tensor.shape().get(1).map_or(0, |&rows| rows as usize),
        };
        let (position, max) = (request.position as usize, shape.positions_max);
        if position.saturating_add(rows) > max {
            let text = format!("{rows} rows from position {position} are too long: a session has {max} tokens at most");
            return Err(KwaaiFailure::Refused(text));
        }
        let reply_max = rows_per_frame(shape.hidden, DataForm::Bin);
        if form == FrameForm::Enveloped && !is_last && rows > reply_max {
            let text = format!("the reply to {rows} rows is too long for a frame: send at most {reply_max} at once");
            return Err(KwaaiFailure::Refused(text));
        }
        Ok(())
    }
}

enum Input {
    Tokens(Vec<TokenId>),
    Activations(Vec<f32>),
}

fn refused(error: impl ToString) -> KwaaiFailure {
    KwaaiFailure::Refused(error.to_string())
}

/// The frame that refuses a call of which only the beginning is read.
async fn refuse(form: FrameForm, stream: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, KwaaiStreamError> {
    let reply = KwaaiReply::Failed(KwaaiFailure::AtCapacity);
    if form == FrameForm::Local {
        return Ok(local_frame(&reply.encode())?);
    }
    let bytes = read_header(stream, form, FRAME_BYTES_MAX).await?;
    let prefix = read_payload(stream, bytes.min(CallId::PREFIX_BYTES)).await?;
    let call = CallId::of_prefix(&prefix).ok_or(KwaaiWireError::Missing("call id"))?;
    Ok(reply_frame(call, &reply)?)
}

/// Runs rows in as many runs as the block needs. Returns the states of all rows, or, with `only_last`, of the last one.
async fn run_rows(
    session: &mut BlockSession,
    shape: &BlockShape,
    position: usize,
    activations: &[f32],
    only_last: bool,
) -> Result<Vec<f32>, RunError> {
    let (rows, hidden) = (activations.len() / shape.hidden, shape.hidden);
    // KwaaiNet does not say which tokens belong to the prompt.
    let phase = if rows > 1 || position == 0 { Phase::Prefill } else { Phase::Decode };
    let mut states = Vec::with_capacity(if only_last { hidden } else { activations.len() });
    for start in (0..rows).step_by(shape.rows_max) {
        let end = rows.min(start + shape.rows_max);
        let state_rows = match only_last {
            true => usize::from(end == rows),
            false => end - start,
        };
        let activations = activations[start * hidden..end * hidden].to_vec();
        let ran = session.run(BlockRows { position: position + start, phase, activations, state_rows }).await?;
        states.extend_from_slice(&ran.states);
    }
    Ok(states)
}

/// Runs the embedding or the head on a thread for blocking work.
async fn blocking(
    embed_and_head: Option<&Arc<Mutex<dyn EmbedAndHead>>>,
    work: impl FnOnce(&mut dyn EmbedAndHead) -> Result<Vec<f32>, ExecutorError> + Send + 'static,
) -> Result<Vec<f32>, KwaaiFailure> {
    let Some(parts) = embed_and_head.cloned() else { return Err(KwaaiFailure::WarmingUp(String::new())) };
    let work = move || work(&mut *parts.lock().unwrap_or_else(PoisonError::into_inner));
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| KwaaiFailure::Panicked(format!(": {error}")))?.map_err(refused)
}
