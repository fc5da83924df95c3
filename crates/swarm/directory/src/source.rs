//! `AddressBlock`: whom a record was heard from, as far as that costs an attacker something. Keys cost nothing, so ten thousand
//! neighbours at one address are one source.

use std::net::IpAddr;

/// Addresses that one owner has: 256 IPv4 addresses, or 2^80 IPv6 addresses. In a private network, where each machine may be
/// somebody else's, one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AddressBlock([u8; 16]);

const IPV4_BYTES: usize = 3;
const IPV6_BYTES: usize = 6;

impl AddressBlock {
    /// Of neighbours whose address is not known.
    pub const UNKNOWN: Self = Self([0; 16]);

    pub fn of(ip: IpAddr) -> Self {
        let ip = ip.to_canonical();
        // IPv4 addresses are written as IPv6 addresses, behind twelve bytes.
        let (bytes, len, is_private) = match ip {
            IpAddr::V4(v4) => {
                let [first, second, ..] = v4.octets();
                let is_shared = first == 100 && second & 0xc0 == 64;
                let is_private = v4.is_private() || v4.is_loopback() || v4.is_link_local() || is_shared;
                (v4.to_ipv6_mapped().octets(), 12 + IPV4_BYTES, is_private)
            }
            IpAddr::V6(v6) => {
                let is_private = v6.is_unique_local() || v6.is_unicast_link_local() || v6.is_loopback();
                (v6.octets(), IPV6_BYTES, is_private)
            }
        };
        let len = if is_private { bytes.len() } else { len };
        let mut block = [0; 16];
        block[..len].copy_from_slice(&bytes[..len]);
        Self(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_owner_has_is_one_block() {
        let block = |text: &str| AddressBlock::of(text.parse().unwrap());
        assert_eq!(block("203.0.113.1"), block("203.0.113.200"));
        assert_eq!(block("203.0.113.1"), block("::ffff:203.0.113.9"));
        assert_ne!(block("203.0.113.1"), block("203.0.114.1"));
        assert_eq!(block("2001:db8:1:2::3"), block("2001:db8:1:ffff::9"));
        assert_ne!(block("2001:db8:1:2::3"), block("2001:db8:2::3"));
        for (one, other) in [("192.168.1.1", "192.168.1.2"), ("100.64.0.1", "100.64.0.2"), ("fd00::1", "fd00::2")] {
            assert_ne!(block(one), block(other));
        }
    }
}
