//! `Attacker`: a client that writes whatever bytes it likes.

use std::sync::Arc;

use blocks::dial::BoxedStream;
use blocks::protocols::{BLOCK_PROTOCOL, PUSH_PROTOCOL};
use blocks::wire::{Activations, Encoding, FailureKind, Open, PushKey, Reply, Request, Run, read_frame, write_frame};
use directory::{ModelDigest, PeerId};
use engine::Phase;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use types::LayerRange;

use crate::network::Network;
use crate::waiting::PATIENCE;

const BODY_MAX: usize = 1 << 24;

pub struct Attacker {
    stream: BoxedStream,
    body: Vec<u8>,
}

impl Attacker {
    /// A client's stream to a peer.
    pub async fn client(network: &Arc<Network>, from: PeerId, to: PeerId) -> Self {
        Self::connect(network, from, to, BLOCK_PROTOCOL).await
    }

    /// A stream on which rows are passed on.
    pub async fn pusher(network: &Arc<Network>, from: PeerId, to: PeerId) -> Self {
        Self::connect(network, from, to, PUSH_PROTOCOL).await
    }

    async fn connect(network: &Arc<Network>, from: PeerId, to: PeerId, protocol: &'static str) -> Self {
        Self::new(network.dial_of(from).open(to, &[], protocol).await.unwrap())
    }

    pub fn new(stream: BoxedStream) -> Self {
        Self { stream, body: Vec::new() }
    }

    pub async fn send(&mut self, request: &Request) {
        let kind = request.encode(&mut self.body);
        write_frame(&mut self.stream, kind, &self.body).await.unwrap();
    }

    /// Also after the stream has ended.
    pub async fn send_bytes(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).await;
        let _ = self.stream.flush().await;
    }

    /// Ends its half of the stream.
    pub async fn finish(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// The next reply, or `None` at the end of the stream.
    pub async fn reply(&mut self) -> Option<Reply> {
        let read = timeout(PATIENCE, read_frame(&mut self.stream, BODY_MAX, &mut self.body)).await;
        let kind = read.expect("a reply or an end comes").ok()?;
        Some(Reply::decode(kind, &self.body).expect("the server's replies are valid"))
    }

    pub async fn failure(&mut self) -> FailureKind {
        match self.reply().await {
            Some(Reply::Failed { kind, .. }) => kind,
            other => panic!("{other:?} is no failure"),
        }
    }

    pub async fn is_ended(&mut self) -> bool {
        self.reply().await.is_none()
    }

    /// Opens a session, and returns whether that succeeded.
    pub async fn open(&mut self, open: Open) -> bool {
        self.send(&Request::Open(open)).await;
        matches!(self.reply().await, Some(Reply::Opened { .. }))
    }
}

pub fn open(model: ModelDigest, session: u64, layers: LayerRange, tokens_max: usize) -> Open {
    Open { session, model, layers, is_last: true, tokens_max, accepts: None, next: None }
}

/// Rows of `hidden` values that a session could have.
pub fn rows(position: usize, rows: usize, hidden: usize) -> Run {
    let values = (0..rows * hidden).map(|index| (index % 11) as f32 * 0.1 - 0.5).collect();
    let activations = Activations { encoding: Encoding::F32, rows, values };
    Run { run: 1, position, phase: Phase::Prefill, state_rows: rows, is_silent: false, activations }
}

/// Numbers that nobody told it.
pub fn guessed_key(number: u8) -> PushKey {
    PushKey([number; 16])
}
