//! `Mangler`: what a hostile peer sends in place of what an honest one would.

use std::sync::Arc;
use std::time::Duration;

use blocks::wire::{Reply, Request, read_frame};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

const BODY_MAX: usize = 1 << 24;

/// A part of a stream.
pub enum Piece {
    Bytes(Vec<u8>),
    Wait(Duration),
    /// Nothing more comes, though the stream stays open.
    Silence,
}

pub trait Mangler: Send + Sync {
    fn reply(&self, reply: Reply) -> Vec<Piece> {
        vec![Piece::of(&reply)]
    }

    /// Rows for the next peer.
    fn push(&self, request: Request) -> Vec<Piece> {
        vec![Piece::of_request(&request)]
    }
}

impl Piece {
    pub fn of(reply: &Reply) -> Self {
        let mut body = Vec::new();
        let kind = reply.encode(&mut body);
        Self::frame(kind, &body)
    }

    pub fn of_request(request: &Request) -> Self {
        let mut body = Vec::new();
        let kind = request.encode(&mut body);
        Self::frame(kind, &body)
    }

    pub fn frame(kind: u8, body: &[u8]) -> Self {
        Self::Bytes(frame(body.len() as u32, kind, body))
    }
}

/// A frame that says that it has so many bytes.
pub fn frame(bytes: u32, kind: u8, body: &[u8]) -> Vec<u8> {
    [&bytes.to_le_bytes()[..], &[kind], body].concat()
}

/// Passes messages on, replaced.
pub async fn mangle(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, mangler: Arc<dyn Mangler>) {
    let mut body = Vec::new();
    while let Ok(kind) = read_frame(&mut from, BODY_MAX, &mut body).await {
        let pieces = match (Reply::decode(kind, &body), Request::decode(kind, &body)) {
            (Ok(reply), _) => mangler.reply(reply),
            (_, Ok(request)) => mangler.push(request),
            (Err(error), _) => panic!("an honest peer's message cannot be read: {error}"),
        };
        for piece in pieces {
            match piece {
                Piece::Bytes(bytes) => {
                    if to.write_all(&bytes).await.is_err() {
                        return;
                    }
                }
                Piece::Wait(time) => tokio::time::sleep(time).await,
                Piece::Silence => std::future::pending().await,
            }
        }
    }
    let _ = to.shutdown().await;
}
