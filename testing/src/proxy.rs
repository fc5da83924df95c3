//! A proxy that forwards bytes and may alter, hold back or cut them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;

/// The fault in the bytes of one direction.
#[derive(Clone, Copy, Debug)]
pub enum TransitFault {
    None,
    /// Alters the byte at this offset.
    Flip(usize),
    /// Closes both sides before the byte at this offset.
    Cut(usize),
    /// Forwards nothing from this offset on, and keeps the connections open.
    Hold(usize),
}

/// Starts a proxy to `target`, which accepts connections until the test ends. Returns its address.
pub fn proxy(target: SocketAddr, there: TransitFault, back: TransitFault) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for caller in listener.incoming() {
            let (caller, called) = (caller.unwrap(), TcpStream::connect(target).unwrap());
            for stream in [&caller, &called] {
                stream.set_nodelay(true).unwrap();
            }
            let (caller_too, called_too) = (caller.try_clone().unwrap(), called.try_clone().unwrap());
            thread::spawn(move || forward(caller, called, there));
            thread::spawn(move || forward(called_too, caller_too, back));
        }
    });
    address
}

fn forward(mut from: TcpStream, mut to: TcpStream, mischief: TransitFault) {
    let (mut bytes, mut place) = ([0; 4096], 0);
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let piece = &mut bytes[..count];
        let here = |at: usize| at.checked_sub(place).filter(|&at| at < count);
        let is_sent = match mischief {
            TransitFault::Flip(at) => {
                here(at).into_iter().for_each(|at| piece[at] ^= 0x41);
                to.write_all(piece).is_ok()
            }
            TransitFault::Cut(at) if here(at).is_some() => {
                let _ = to.write_all(&piece[..at - place]);
                false
            }
            TransitFault::Hold(at) if here(at).is_some() => {
                let _ = to.write_all(&piece[..at - place]);
                // Reads until the sender closes.
                while let Ok(1..) = from.read(&mut bytes) {}
                return;
            }
            _ => to.write_all(piece).is_ok(),
        };
        if !is_sent {
            break;
        }
        place += count;
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
