//! Anything that a cake peer sends is parsed or rejected, within memory in proportion to its size; a parsed message is
//! written and read again without a change.
#![no_main]

use cake::layer_ranges;
use cake::read_any_packet;
use cake::wire::{
    CakeChunk, CakeChunkCheck, CakeDType, CakeMessage, CakeOp, CakeTensor, CakeVariant, CakeWorkerInfo,
    FRAME_HEADER_BYTES, activation_rows, payload_bytes,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: fuzz::plant("cake_wire", &seeds()),
    |input: &[u8]| fuzz::within_memory(input, read_any)
);

/// The input is a frame, and also a packet of discovery.
fn read_any(input: &[u8]) {
    read_any_packet(input);
    let Some((header, payload)) = input.split_first_chunk::<FRAME_HEADER_BYTES>() else { return };
    let _ = payload_bytes(*header, payload.len());
    let _ = CakeVariant::of(payload);
    for variant in [CakeVariant::Head, CakeVariant::Older] {
        let Ok(message) = CakeMessage::decode(payload, variant) else { continue };
        let frame = message.encode(variant).expect("a message that was read fits into a frame");
        assert_eq!(CakeMessage::decode(&frame[FRAME_HEADER_BYTES..], variant).as_ref(), Ok(&message));
        match &message {
            CakeMessage::Batch { x, ops } => {
                let _ = (activation_rows(x, 2), layer_ranges(ops.iter().map(|op| op.layer)));
            }
            CakeMessage::LayerAssignment { layers, .. } => drop(layer_ranges(layers.iter().copied())),
            _ => {}
        }
    }
}

/// Each message as a frame, and the two packets.
fn seeds() -> Vec<Vec<u8>> {
    let data = [0, 0x3c, 0, 0xc0];
    let x = CakeTensor::new(&data, CakeDType::F16, vec![1, 1, 2]).expect("the size is right");
    let op = CakeOp { layer: "model.layers.5", position: 7, block: 5 };
    let info = CakeWorkerInfo {
        version: "0.1.0",
        dtype: "F16",
        os: "linux",
        arch: "x86_64",
        device: "cpu",
        device_index: 0,
        latency_ms: 1,
    };
    let check = Some(CakeChunkCheck { is_compressed: true, crc: 7 });
    let chunk = CakeChunk { file: "config.json", offset: 0, total_bytes: 4, check, data: &data };
    let older = CakeMessage::ModelDataChunk(CakeChunk { check: None, ..chunk.clone() });
    let head = [
        CakeMessage::Hello,
        CakeMessage::WorkerInfo(info),
        CakeMessage::SingleOp { x: x.clone(), op: op.clone() },
        CakeMessage::Batch { x: x.clone(), ops: vec![op.clone(), op] },
        CakeMessage::Tensor(x),
        CakeMessage::LayerAssignment { layers: vec!["model.layers.0", "model.layers.1"], model_hash: "00112233" },
        CakeMessage::LayerAssignmentAck { needs_data: true },
        CakeMessage::ModelDataChunk(chunk),
        CakeMessage::ModelDataResume { file: "config.json", offset: 2 },
        CakeMessage::WorkerReady,
        CakeMessage::WorkerError { message: "no" },
    ];
    let frames = head.iter().map(|message| message.encode(CakeVariant::Head));
    let frames = frames.chain([older.encode(CakeVariant::Older)]).map(|frame| frame.expect("it is small"));
    let query = br#"CAKE{"cluster_hash":"53aac2b2"}"#.to_vec();
    let answer = br#"CAKE{"cluster_hash":"53aac2b2","worker_name":"w","port":10128,"gpus":[{"name":"g","vram_bytes":5,"tflops":2.0}]}"#;
    frames.chain([query, answer.to_vec()]).collect()
}
