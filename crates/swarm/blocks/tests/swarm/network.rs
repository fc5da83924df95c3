//! Peers in one process. Every connection is a pair of pipes with a task between them, which can be told to cut, to stop, or to
//! garble what passes. A hostile peer is one whose messages are replaced on their way.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::mangler::{Mangler, mangle};
use blocks::block::BlockHandle;
use blocks::dial::{BoxedStream, Dial, DialError, Dialled};
use blocks::protocols::{BLOCK_PROTOCOL, PUSH_PROTOCOL};
use blocks::serve::BlockServer;
use blocks::view::{SwarmView, now};
use directory::{BlockRecord, BlockUse, ModelDigest, PeerId, Reach, ServiceState, Speed, VerifiedRecord};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf, duplex, split};
use tokio::sync::watch;
use types::{DType, LayerRange};

const PIPE_BYTES: usize = 64 << 10;

/// What happens to the connections of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// They end, and nobody can connect.
    Cut,
    /// Nothing passes, and nobody notices.
    Stopped,
    /// The peer's bytes are changed.
    Garbled,
}

pub struct Peer {
    pub server: BlockServer,
    fault: watch::Sender<Fault>,
    mangler: Option<Arc<dyn Mangler>>,
}

#[derive(Default)]
pub struct Network {
    peers: Mutex<HashMap<PeerId, Peer>>,
    view: Arc<SwarmView>,
    sequence: AtomicU64,
    /// Peers cannot reach each other, though clients reach all of them.
    is_divided: bool,
    /// Bytes that passed between peers, on push streams.
    pub pushed: Arc<AtomicU64>,
}

struct From {
    network: Arc<Network>,
    peer: PeerId,
}

impl Dial for From {
    fn open<'a>(&'a self, peer: PeerId, _: &'a [String], protocol: &'static str) -> Dialled<'a> {
        Box::pin(async move { self.network.connect(self.peer, peer, protocol) })
    }

    fn addresses(&self, _: PeerId) -> Vec<String> {
        Vec::new()
    }
}

impl Network {
    pub fn new(is_divided: bool) -> Arc<Self> {
        Arc::new(Self { is_divided, ..Self::default() })
    }

    pub fn view(&self) -> &Arc<SwarmView> {
        &self.view
    }

    pub fn dial_of(self: &Arc<Self>, peer: PeerId) -> Arc<dyn Dial> {
        Arc::new(From { network: Arc::clone(self), peer })
    }

    /// A peer that serves a block, and its record.
    pub fn add(
        self: &Arc<Self>,
        peer: PeerId,
        model: ModelDigest,
        layers: LayerRange,
        block: BlockHandle,
        layer_seconds: f32,
    ) {
        let server = BlockServer::new(self.dial_of(peer));
        server.set_block(model, block);
        self.peers.lock().unwrap().insert(peer, Peer { server, fault: watch::Sender::new(Fault::None), mangler: None });
        self.announce(peer, model, layers, layer_seconds);
    }

    pub fn announce(&self, peer: PeerId, model: ModelDigest, layers: LayerRange, layer_seconds: f32) {
        self.view.insert(self.record(peer, model, layers, layer_seconds)).unwrap();
    }

    pub fn record(&self, peer: PeerId, model: ModelDigest, layers: LayerRange, layer_seconds: f32) -> VerifiedRecord {
        let speed = Speed { layer_seconds, layer_tokens_per_s: 100.0, queue_seconds: 0.0, bytes_per_s: 1e8 };
        let record = BlockRecord {
            peer,
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed),
            issued: now(),
            lifetime_ms: 600_000,
            model,
            layers,
            block_use: BlockUse::AnyRange,
            dtype: DType::F32,
            state: ServiceState::Serving,
            reach: Reach::Direct,
            speed,
            kv_tokens_free: 100_000,
            coordinate: None,
            neighbours: Vec::new(),
        };
        VerifiedRecord::configured(record).unwrap()
    }

    pub fn fail(&self, peer: PeerId, fault: Fault) {
        self.peers.lock().unwrap()[&peer].fault.send_replace(fault);
    }

    /// From now on what the peer sends on new connections is replaced.
    pub fn mangle(&self, peer: PeerId, mangler: Arc<dyn Mangler>) {
        self.peers.lock().unwrap().get_mut(&peer).unwrap().mangler = Some(mangler);
    }

    pub fn server(&self, peer: PeerId) -> BlockServer {
        self.peers.lock().unwrap()[&peer].server.clone()
    }

    fn connect(&self, from: PeerId, to: PeerId, protocol: &'static str) -> Result<BoxedStream, DialError> {
        let is_between_peers = protocol == PUSH_PROTOCOL;
        if is_between_peers && self.is_divided {
            return Err(DialError("no way".to_owned()));
        }
        let peers = self.peers.lock().unwrap();
        let Some(peer) = peers.get(&to) else { return Err(DialError("no such peer".to_owned())) };
        if *peer.fault.borrow() == Fault::Cut {
            return Err(DialError("no answer".to_owned()));
        }
        let (near, middle_near) = duplex(PIPE_BYTES);
        let (middle_far, far) = duplex(PIPE_BYTES);
        let server = peer.server.clone();
        tokio::spawn(async move {
            match protocol {
                BLOCK_PROTOCOL => server.serve_client(from, Box::new(far)).await,
                PUSH_PROTOCOL => server.serve_pushes(from, Box::new(far)).await,
                other => panic!("{other} is no protocol of ours"),
            }
        });
        let (near_read, near_write) = split(middle_near);
        let (far_read, far_write) = split(middle_far);
        let callers = peers.get(&from).map(|peer| peer.fault.subscribe());
        let calls = Pipe { faults: vec![Some(peer.fault.subscribe()), callers.clone()], garbles: 1 };
        let replies = Pipe { faults: vec![Some(peer.fault.subscribe()), callers], garbles: 0 };
        let counter = is_between_peers.then(|| Arc::clone(&self.pushed));
        let pushes = peers.get(&from).and_then(|peer| peer.mangler.clone()).filter(|_| is_between_peers);
        match (pushes, peer.mangler.clone().filter(|_| !is_between_peers)) {
            (Some(mangler), _) => drop(tokio::spawn(mangle(near_read, far_write, mangler))),
            (None, replies_mangler) => {
                tokio::spawn(calls.run(near_read, far_write, counter));
                match replies_mangler {
                    Some(mangler) => drop(tokio::spawn(mangle(far_read, near_write, mangler))),
                    None => drop(tokio::spawn(replies.run(far_read, near_write, None))),
                }
            }
        }
        Ok(Box::new(near))
    }
}

/// One direction of a connection.
struct Pipe {
    faults: Vec<Option<watch::Receiver<Fault>>>,
    /// Whose garbling counts: the sender's.
    garbles: usize,
}

impl Pipe {
    fn has(&self, fault: Fault) -> bool {
        self.faults.iter().flatten().any(|state| *state.borrow() == fault)
    }

    async fn changed(&mut self) {
        let mut waits: Vec<_> = self.faults.iter_mut().flatten().map(|state| Box::pin(state.changed())).collect();
        match waits.len() {
            0 => std::future::pending().await,
            1 => drop((&mut waits[0]).await),
            _ => {
                let (first, second) = waits.split_at_mut(1);
                tokio::select! { _ = &mut first[0] => {}, _ = &mut second[0] => {} }
            }
        }
    }

    async fn run<S: tokio::io::AsyncRead + tokio::io::AsyncWrite>(
        mut self,
        mut from: ReadHalf<S>,
        mut to: WriteHalf<S>,
        counter: Option<Arc<AtomicU64>>,
    ) {
        let mut buffer = vec![0; PIPE_BYTES];
        loop {
            if self.has(Fault::Cut) {
                return;
            }
            if self.has(Fault::Stopped) {
                self.changed().await;
                continue;
            }
            let bytes = tokio::select! {
                read = from.read(&mut buffer) => match read {
                    Ok(0) | Err(_) => {
                        // The other end sees that nothing more comes.
                        let _ = to.shutdown().await;
                        return;
                    }
                    Ok(bytes) => bytes,
                },
                () = self.changed() => continue,
            };
            while self.has(Fault::Stopped) {
                self.changed().await;
            }
            let is_garbled = self.faults[self.garbles].as_ref().is_some_and(|state| *state.borrow() == Fault::Garbled);
            if is_garbled {
                buffer[..bytes].iter_mut().step_by(7).for_each(|byte| *byte ^= 0x5a);
            }
            if let Some(counter) = &counter {
                counter.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            if to.write_all(&buffer[..bytes]).await.is_err() {
                return;
            }
        }
    }
}
