//! A node lends so much memory and no more, whatever a coordinator asks for, and says when it lends another amount.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use cluster::purpose::ConnectionId;
use cluster::wire::control::{ControlKind, ControlReply, ControlRequest, StageSpec, UNASKED, decode, encode};
use kernels::cpu::CpuOptions;
use model::{Checkpoint, ModelPart};
use net::{MessageStream, WaitLimit};
use ranks::protocol::shard::WireLimits;
use tempfile::TempDir;
use testing::cluster_chain::{DEADLINE, OPTIONS};
use types::LayerRange;

use crate::loopback::oracle_models;
use crate::nodes::{TestNode, chain, coordinator, key, memory_for, used};

/// A coordinator that says what it likes.
struct Rude(MessageStream);

impl Rude {
    fn connect(address: SocketAddr) -> Self {
        let (hello, limit) =
            (ConnectionId::control().hello(Duration::from_secs(60)), WaitLimit::until(Instant::now() + DEADLINE));
        Self(MessageStream::connect(address, &key("one"), &hello, &limit).unwrap())
    }

    fn ask(&mut self, request: &ControlRequest) -> ControlReply {
        self.0.sender.send(ControlKind::Json as u8, &[&encode(request)]).unwrap();
        self.hear()
    }

    fn hear(&mut self) -> ControlReply {
        let (deadline, mut body) = (Some(Instant::now() + DEADLINE), Vec::new());
        self.0.receiver.receive(deadline, |_| Some(1 << 20), &mut body).unwrap().unwrap();
        decode(&body).unwrap()
    }

    fn memory(&mut self) -> u64 {
        let ControlReply::Facts { id: 7, facts } = self.ask(&ControlRequest::Describe { id: 7 }) else { panic!() };
        facts.memory_bytes
    }
}

/// All of a model's layers.
fn spec(checkpoint: &Checkpoint, layers: LayerRange) -> StageSpec {
    let mut manifest = checkpoint.manifest().unwrap();
    (0..manifest.tensors().len()).for_each(|index| manifest.set_hash(index, [index as u8; 32]));
    let cpu = CpuOptions::default();
    StageSpec {
        model: "test".to_owned(),
        manifest,
        layer_start: layers.start() as u32,
        layer_end: layers.end() as u32,
        keep: None,
        exact: None,
        kv: cpu.kv.into(),
        decode: cpu.decode.into(),
        prompt: cpu.prompt.into(),
        limits: WireLimits::from(&OPTIONS.limits),
    }
}

#[test]
fn a_coordinator_that_asks_for_too_much_is_refused_before_anything_is_fetched() {
    let model = oracle_models().remove(0);
    let checkpoint = Checkpoint::open(&model).unwrap();
    let layers = LayerRange::new(0, checkpoint.description().layers.len() as u32).unwrap();
    let one = ModelPart::stage(LayerRange::new(0, 1).unwrap());
    let store = TempDir::new().unwrap();
    let node = TestNode::start("node", key("one"), store.path(), Some(memory_for(&checkpoint, one)));
    let mut rude = Rude::connect(node.address);
    let reply = rude.ask(&ControlRequest::Load { id: 9, stage: Box::new(spec(&checkpoint, layers)) });
    let ControlReply::Failed { id: 9, why } = reply else { panic!("{reply:?}") };
    assert!(why.contains("this machine lends") && why.contains("--memory"), "{why}");
    let kept = std::fs::read_dir(store.path()).unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.len() >= 64
    });
    assert_eq!(kept.count(), 0);
}

#[test]
fn what_one_coordinator_holds_another_cannot_have_and_is_told_when_it_is_free() {
    let model = oracle_models().remove(0);
    let checkpoint = Checkpoint::open(&model).unwrap();
    let all = LayerRange::new(0, checkpoint.description().layers.len() as u32).unwrap();
    let lent = memory_for(&checkpoint, ModelPart::stage(all));
    let store = TempDir::new().unwrap();
    let node = TestNode::start("node", key("one"), store.path(), Some(lent));
    let mut other = Rude::connect(node.address);
    assert_eq!(other.memory(), lent);
    let chain = chain(coordinator(&model, key("one"), &[node.address], Some(&[all.count()]), u64::MAX >> 1));
    assert_eq!(used(&chain), [node.address]);
    // It says so by itself, and again when the memory is free.
    let ControlReply::Facts { id: UNASKED, facts } = other.hear() else { panic!("it says nothing") };
    assert!(facts.memory_bytes < lent / 4, "{} of {lent}", facts.memory_bytes);
    let reply = other.ask(&ControlRequest::Load { id: 9, stage: Box::new(spec(&checkpoint, all)) });
    let ControlReply::Failed { id: 9, why } = reply else { panic!("{reply:?}") };
    assert!(why.contains("of which other stages hold"), "{why}");
    drop(chain);
    let ControlReply::Facts { id: UNASKED, facts } = other.hear() else { panic!("it says nothing") };
    assert_eq!(facts.memory_bytes, lent);
}
