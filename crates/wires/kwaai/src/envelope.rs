//! `UnaryMessage`: the envelope of a call or of its reply, hivemind's `PersistentConnectionRequest`.

use crate::KwaaiWireError;
use crate::frame::{FRAME_BYTES_MAX, put_header};
use crate::protobuf::{bytes_field_bytes, put_bytes, put_length, read_fields};

/// The protocol id of block inference.
pub const INFERENCE_PROTOCOL: &str = "/kwaai/inference/1.0.0";
pub const CALL_ID_BYTES: usize = 16;

/// What a reply repeats of its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId(pub [u8; CALL_ID_BYTES]);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnaryMessage<'a> {
    pub call: CallId,
    pub body: UnaryBody<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnaryBody<'a> {
    /// `peer` is by convention the id of the peer that is called. Neither it nor `protocol` is to be trusted: the
    /// connection proves who the peer is, and the stream has the protocol.
    Call {
        peer: &'a [u8],
        protocol: &'a str,
        data: &'a [u8],
    },
    Response(&'a [u8]),
    /// The call failed in the transport or in the handler. Failures of the model are responses.
    Error(&'a str),
}

mod field {
    pub const CALL_ID: u32 = 1;
    pub const ADD_HANDLER: u32 = 2;
    pub const CALL: u32 = 3;
    pub const REPLY: u32 = 4;
    pub const CANCEL: u32 = 5;
    pub const REMOVE_HANDLER: u32 = 6;
    pub const CALL_PEER: u32 = 1;
    pub const CALL_PROTOCOL: u32 = 2;
    pub const CALL_DATA: u32 = 3;
    pub const REPLY_RESPONSE: u32 = 1;
    pub const REPLY_ERROR: u32 = 2;
}

impl<'a> UnaryMessage<'a> {
    /// Reads the payload of a frame. All required fields have to be there, even if empty.
    pub fn decode(payload: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let (mut call, mut body) = (None, None);
        read_fields(payload, "envelope", |number, value| {
            match number {
                field::CALL_ID => call = Some(CallId::read(value.bytes("call id")?)?),
                field::CALL => body = Some(UnaryBody::read_call(value.bytes("call")?)?),
                field::REPLY => body = Some(UnaryBody::read_reply(value.bytes("reply")?)?),
                field::ADD_HANDLER | field::CANCEL | field::REMOVE_HANDLER => {
                    return Err(KwaaiWireError::UnknownBody(number));
                }
                _ => {}
            }
            Ok(())
        })?;
        let call = call.ok_or(KwaaiWireError::Missing("call id"))?;
        Ok(Self { call, body: body.ok_or(KwaaiWireError::Missing("call or reply"))? })
    }

    /// The whole frame.
    pub fn encode(&self) -> Result<Vec<u8>, KwaaiWireError> {
        let (field, body_bytes) = match self.body {
            UnaryBody::Call { peer, protocol, data } => {
                (field::CALL, [peer.len(), protocol.len(), data.len()].map(bytes_field_bytes).iter().sum())
            }
            UnaryBody::Response(data) => (field::REPLY, bytes_field_bytes(data.len())),
            UnaryBody::Error(text) => (field::REPLY, bytes_field_bytes(text.len())),
        };
        let payload_bytes = bytes_field_bytes(CALL_ID_BYTES) + bytes_field_bytes(body_bytes);
        if payload_bytes > FRAME_BYTES_MAX {
            return Err(KwaaiWireError::FrameTooLong { bytes: payload_bytes as u64, max: FRAME_BYTES_MAX });
        }
        let mut frame = Vec::with_capacity(bytes_field_bytes(payload_bytes));
        put_header(&mut frame, payload_bytes);
        put_bytes(&mut frame, field::CALL_ID, &self.call.0);
        put_length(&mut frame, field, body_bytes);
        match self.body {
            UnaryBody::Call { peer, protocol, data } => {
                put_bytes(&mut frame, field::CALL_PEER, peer);
                put_bytes(&mut frame, field::CALL_PROTOCOL, protocol.as_bytes());
                put_bytes(&mut frame, field::CALL_DATA, data);
            }
            UnaryBody::Response(data) => put_bytes(&mut frame, field::REPLY_RESPONSE, data),
            UnaryBody::Error(text) => put_bytes(&mut frame, field::REPLY_ERROR, text.as_bytes()),
        }
        Ok(frame)
    }
}

impl CallId {
    /// How much of a payload [`CallId::of_prefix`] needs.
    pub const PREFIX_BYTES: usize = 2 + CALL_ID_BYTES;

    /// The call of a payload that begins with these bytes, if its id comes first, as all known writers have it. So a call can
    /// be refused before it is read.
    pub fn of_prefix(payload: &[u8]) -> Option<Self> {
        const TAG: [u8; 2] = [(field::CALL_ID << 3 | 2) as u8, CALL_ID_BYTES as u8];
        payload.strip_prefix(&TAG)?.first_chunk().map(|id| Self(*id))
    }

    fn read(bytes: &[u8]) -> Result<Self, KwaaiWireError> {
        let id = bytes.try_into();
        let length = KwaaiWireError::Length { what: "call id", found: bytes.len(), expected: CALL_ID_BYTES };
        id.map(Self).map_err(|_| length)
    }
}

impl<'a> UnaryBody<'a> {
    fn read_call(message: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let (mut peer, mut protocol, mut data) = (None, None, None);
        read_fields(message, "call", |number, value| {
            match number {
                field::CALL_PEER => peer = Some(value.bytes("peer")?),
                field::CALL_PROTOCOL => protocol = Some(value.text("protocol")?),
                field::CALL_DATA => data = Some(value.bytes("data")?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(Self::Call {
            peer: peer.ok_or(KwaaiWireError::Missing("peer"))?,
            protocol: protocol.ok_or(KwaaiWireError::Missing("protocol"))?,
            data: data.ok_or(KwaaiWireError::Missing("data"))?,
        })
    }

    fn read_reply(message: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let mut reply = None;
        read_fields(message, "reply", |number, value| {
            match number {
                field::REPLY_RESPONSE => reply = Some(Self::Response(value.bytes("response")?)),
                field::REPLY_ERROR => reply = Some(Self::Error(value.text("error")?)),
                _ => {}
            }
            Ok(())
        })?;
        reply.ok_or(KwaaiWireError::Missing("response or error"))
    }
}
