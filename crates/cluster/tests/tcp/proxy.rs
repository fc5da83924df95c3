//! Somebody in the middle, who forwards bytes and may alter, hold back or cut them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;

/// What happens to the bytes of one direction.
#[derive(Clone, Copy, Debug)]
pub enum Mischief {
    None,
    /// Alters the byte at this place.
    Flip(usize),
    /// Closes both sides before the byte at this place.
    Cut(usize),
    /// Forwards nothing from this place on, and keeps the connections open.
    Hold(usize),
}

/// The address to call instead of `target`. It serves calls until the test ends.
pub fn proxy(target: SocketAddr, there: Mischief, back: Mischief) -> SocketAddr {
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

fn forward(mut from: TcpStream, mut to: TcpStream, mischief: Mischief) {
    let (mut bytes, mut place) = ([0; 4096], 0);
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let piece = &mut bytes[..count];
        let here = |at: usize| at.checked_sub(place).filter(|&at| at < count);
        let is_sent = match mischief {
            Mischief::Flip(at) => {
                here(at).into_iter().for_each(|at| piece[at] ^= 0x41);
                to.write_all(piece).is_ok()
            }
            Mischief::Cut(at) if here(at).is_some() => {
                let _ = to.write_all(&piece[..at - place]);
                false
            }
            Mischief::Hold(at) if here(at).is_some() => {
                let _ = to.write_all(&piece[..at - place]);
                // Until the sender closes.
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
