//! `KwaaiRequest` and `KwaaiReply`: what a call asks of a peer's blocks, and what comes back. As MessagePack, and in
//! envelopes.

use std::borrow::Cow;

use types::TokenId;

use crate::KwaaiWireError;
use crate::envelope::{CallId, INFERENCE_PROTOCOL, UnaryBody, UnaryMessage};
use crate::failure::KwaaiFailure;
use crate::msgpack::{Reader, put_array, put_bin, put_map, put_nil, put_text, put_uint};
use crate::tensor::{KwaaiTensor, RANK_MAX};

const REQUEST_FIELDS: [&str; 5] = ["session_id", "seq_pos", "payload_type", "shape", "data"];
const REPLY_FIELDS: [&str; 5] = ["session_id", "response_type", "shape", "data", "error"];
const TOKEN_IDS: &str = "token_ids";
const HIDDEN_STATES: &str = "hidden_states";
const LOGITS: &str = "logits";
const TOKEN_BYTES: usize = 4;
/// What a message takes beside its data and texts.
const FIELDS_BYTES: usize = 128;

/// Runs all blocks of a peer on the next tokens of a session. Their keys and values are appended, whatever `position` says:
/// a request that is sent twice corrupts the session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KwaaiRequest<'a> {
    /// A peer makes the session when it first sees the id.
    pub session: u64,
    /// Of the first token of this request.
    pub position: u32,
    pub input: KwaaiInput<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KwaaiInput<'a> {
    /// One at least. For a peer that has block 0.
    Tokens(Vec<TokenId>),
    HiddenStates(KwaaiTensor<'a>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KwaaiReply<'a> {
    HiddenStates {
        session: u64,
        tensor: KwaaiTensor<'a>,
    },
    /// From the last block, of the last token.
    Logits {
        session: u64,
        tensor: KwaaiTensor<'a>,
    },
    Failed(KwaaiFailure),
}

/// The frame of a call to `peer`.
pub fn call_frame(call: CallId, peer: &[u8], request: &KwaaiRequest<'_>) -> Result<Vec<u8>, KwaaiWireError> {
    let data = request.encode();
    UnaryMessage { call, body: UnaryBody::Call { peer, protocol: INFERENCE_PROTOCOL, data: &data } }.encode()
}

/// The frame of the reply to a call.
pub fn reply_frame(call: CallId, reply: &KwaaiReply<'_>) -> Result<Vec<u8>, KwaaiWireError> {
    match reply {
        KwaaiReply::Failed(failure) if failure.is_of_call() => {
            UnaryMessage { call, body: UnaryBody::Error(&failure.to_string()) }.encode()
        }
        _ => UnaryMessage { call, body: UnaryBody::Response(&reply.encode()) }.encode(),
    }
}

/// The call in a frame with this payload. A request that is wrong can be answered.
pub fn read_call(payload: &[u8]) -> Result<(CallId, Result<KwaaiRequest<'_>, KwaaiWireError>), KwaaiWireError> {
    match UnaryMessage::decode(payload)? {
        UnaryMessage { call, body: UnaryBody::Call { data, .. } } => Ok((call, KwaaiRequest::decode(data))),
        _ => Err(KwaaiWireError::Unexpected),
    }
}

/// The reply to `call` in a frame with this payload.
pub fn read_reply(payload: &[u8], call: CallId) -> Result<KwaaiReply<'_>, KwaaiWireError> {
    let message = UnaryMessage::decode(payload)?;
    if message.call != call {
        return Err(KwaaiWireError::OtherCall);
    }
    match message.body {
        UnaryBody::Response(data) => KwaaiReply::decode(data),
        UnaryBody::Error(text) => Ok(KwaaiReply::Failed(KwaaiFailure::of_error(text))),
        UnaryBody::Call { .. } => Err(KwaaiWireError::Unexpected),
    }
}

impl<'a> KwaaiRequest<'a> {
    pub fn decode(bytes: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let (mut session, mut position, mut kind, mut shape, mut data) = (None, None, None, None, None);
        Reader::new(bytes).fields(&REQUEST_FIELDS, "request", |field, reader| {
            match field {
                0 => session = Some(reader.u64("session id")?),
                1 => position = Some(reader.u32("position")?),
                2 => kind = Some(reader.text("payload type")?),
                3 => shape = Some(read_shape(reader)?),
                _ => data = Some(reader.bytes("data")?),
            }
            Ok(())
        })?;
        let session = session.ok_or(KwaaiWireError::Missing("session id"))?;
        let position = position.ok_or(KwaaiWireError::Missing("position"))?;
        let shape = shape.ok_or(KwaaiWireError::Missing("shape"))?;
        let data = data.ok_or(KwaaiWireError::Missing("data"))?;
        let input = match kind.ok_or(KwaaiWireError::Missing("payload type"))? {
            TOKEN_IDS => KwaaiInput::Tokens(tokens(&data)?),
            HIDDEN_STATES => KwaaiInput::HiddenStates(KwaaiTensor::new(data, shape)?),
            _ => return Err(KwaaiWireError::UnknownKind("payload type")),
        };
        Ok(Self { session, position, input })
    }

    pub fn encode(&self) -> Vec<u8> {
        let (kind, shape, data) = match &self.input {
            KwaaiInput::Tokens(tokens) => {
                let data: Vec<u8> = tokens.iter().flat_map(|token| token.0.to_le_bytes()).collect();
                (TOKEN_IDS, &[u32::try_from(tokens.len()).unwrap_or(u32::MAX)][..], Cow::Owned(data))
            }
            KwaaiInput::HiddenStates(tensor) => (HIDDEN_STATES, tensor.shape(), Cow::Borrowed(tensor.data())),
        };
        let mut out = Vec::with_capacity(FIELDS_BYTES + data.len());
        put_map(&mut out, REQUEST_FIELDS.len());
        put_text(&mut out, REQUEST_FIELDS[0]);
        put_uint(&mut out, self.session);
        put_text(&mut out, REQUEST_FIELDS[1]);
        put_uint(&mut out, self.position.into());
        put_text(&mut out, REQUEST_FIELDS[2]);
        put_text(&mut out, kind);
        put_text(&mut out, REQUEST_FIELDS[3]);
        put_shape(&mut out, shape);
        put_text(&mut out, REQUEST_FIELDS[4]);
        put_bin(&mut out, &data);
        out
    }
}

impl<'a> KwaaiReply<'a> {
    pub fn decode(bytes: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let (mut session, mut kind, mut shape, mut data, mut error) = (None, None, None, None, None);
        Reader::new(bytes).fields(&REPLY_FIELDS, "response", |field, reader| {
            match field {
                0 => session = Some(reader.u64("session id")?),
                1 => kind = Some(reader.text("response type")?),
                2 => shape = Some(read_shape(reader)?),
                3 => data = Some(reader.bytes("data")?),
                _ if reader.is_nil() => {}
                _ => error = Some(reader.text("error")?),
            }
            Ok(())
        })?;
        let session = session.ok_or(KwaaiWireError::Missing("session id"))?;
        let kind = kind.ok_or(KwaaiWireError::Missing("response type"))?;
        let shape = shape.ok_or(KwaaiWireError::Missing("shape"))?;
        let data = data.ok_or(KwaaiWireError::Missing("data"))?;
        if let Some(text) = error {
            return Ok(Self::Failed(KwaaiFailure::of_response(text)));
        }
        match kind {
            HIDDEN_STATES => Ok(Self::HiddenStates { session, tensor: KwaaiTensor::new(data, shape)? }),
            LOGITS => Ok(Self::Logits { session, tensor: KwaaiTensor::new(data, shape)? }),
            _ => Err(KwaaiWireError::UnknownKind("response type")),
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let (session, kind, tensor, error) = match self {
            Self::HiddenStates { session, tensor } => (*session, HIDDEN_STATES, Some(tensor), None),
            Self::Logits { session, tensor } => (*session, LOGITS, Some(tensor), None),
            Self::Failed(failure) => (0, HIDDEN_STATES, None, Some(failure.to_string())),
        };
        let data = tensor.map_or(&[][..], KwaaiTensor::data);
        let mut out = Vec::with_capacity(FIELDS_BYTES + data.len() + error.as_deref().map_or(0, str::len));
        put_map(&mut out, REPLY_FIELDS.len());
        put_text(&mut out, REPLY_FIELDS[0]);
        put_uint(&mut out, session);
        put_text(&mut out, REPLY_FIELDS[1]);
        put_text(&mut out, kind);
        put_text(&mut out, REPLY_FIELDS[2]);
        put_shape(&mut out, tensor.map_or(&[], KwaaiTensor::shape));
        put_text(&mut out, REPLY_FIELDS[3]);
        // No data as KwaaiNet writes it: as an array.
        if data.is_empty() {
            put_array(&mut out, 0)
        } else {
            put_bin(&mut out, data)
        }
        put_text(&mut out, REPLY_FIELDS[4]);
        match &error {
            Some(text) => put_text(&mut out, text),
            None => put_nil(&mut out),
        }
        out
    }
}

fn tokens(data: &[u8]) -> Result<Vec<TokenId>, KwaaiWireError> {
    match data.as_chunks::<TOKEN_BYTES>() {
        ([], _) | (_, [_, ..]) => Err(KwaaiWireError::TokenBytes { bytes: data.len() }),
        (tokens, []) => Ok(tokens.iter().map(|&bytes| TokenId(u32::from_le_bytes(bytes))).collect()),
    }
}

fn read_shape(reader: &mut Reader<'_>) -> Result<Vec<u32>, KwaaiWireError> {
    let found = reader.array("shape")?;
    if found > RANK_MAX {
        return Err(KwaaiWireError::TooMany { what: "dimensions", found, max: RANK_MAX });
    }
    (0..found).map(|_| reader.u32("shape")).collect()
}

fn put_shape(out: &mut Vec<u8>, shape: &[u32]) {
    put_array(out, shape.len());
    shape.iter().for_each(|&dim| put_uint(out, dim.into()));
}
