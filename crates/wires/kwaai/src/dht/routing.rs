//! Where a peer can be reached. Records name peers by their ids alone; addresses come from libp2p's Kademlia, which each node of the
//! network runs too: one request for the peers that are closest to an id, and one response, each behind its length as a varint.

use crate::KwaaiWireError;
use crate::protobuf::{push, put_bytes, put_uint, put_varint, read_fields};

/// The protocol of Kademlia in KwaaiNet: libp2p's default.
pub const KADEMLIA_PROTOCOL: &str = "/ipfs/kad/1.0.0";
/// The longest response that is read.
pub const ROUTING_BYTES_MAX: usize = 64 << 10;
/// The most addresses that are taken of a peer.
pub const ROUTING_ADDRESSES_MAX: usize = 16;

const FIND_NODE: u64 = 4;
const TYPE: u32 = 1;
const KEY: u32 = 2;
const CLOSER_PEERS: u32 = 8;
const PEER_ID: u32 = 1;
const PEER_ADDRESS: u32 = 2;

/// The frame that asks for the peers closest to `peer`, the bytes of an id.
pub fn routing_request(peer: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    put_uint(&mut message, TYPE, FIND_NODE);
    put_bytes(&mut message, KEY, peer);
    let mut frame = Vec::with_capacity(message.len() + 2);
    put_varint(&mut frame, message.len() as u64);
    frame.extend_from_slice(&message);
    frame
}

/// The addresses of `peer`, if it is in a response: the bytes of multiaddresses. Those beyond [`ROUTING_ADDRESSES_MAX`] are left out.
pub fn routing_addresses<'a>(response: &'a [u8], peer: &[u8]) -> Result<Vec<&'a [u8]>, KwaaiWireError> {
    let mut found = Vec::new();
    read_fields(response, "routing response", |number, value| {
        if number != CLOSER_PEERS {
            return Ok(());
        }
        let (mut is_it, mut addresses) = (false, Vec::new());
        read_fields(value.bytes("closer peer")?, "closer peer", |number, value| {
            match number {
                PEER_ID => is_it = value.bytes("peer id")? == peer,
                PEER_ADDRESS if addresses.len() < ROUTING_ADDRESSES_MAX => {
                    push(&mut addresses, value.bytes("address")?, "addresses", ROUTING_ADDRESSES_MAX)?;
                }
                _ => {}
            }
            Ok(())
        })?;
        if is_it {
            found = addresses;
        }
        Ok(())
    })?;
    Ok(found)
}
