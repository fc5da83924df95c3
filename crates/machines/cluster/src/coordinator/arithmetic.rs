//! `Arithmetic`: with which CPU instructions the machines of a chain compute. CPUs with other instructions may round
//! differently, so only machines with the same ones compute the same bits.

use kernels::cpu::Level;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arithmetic {
    /// Each machine uses its best instructions.
    #[default]
    Best,
    /// All machines use the lowest level of those that are there when the first chain is formed. From then on it is
    /// [`Arithmetic::Exact`], so that the bits of a stream never change.
    Common,
    /// All machines use this level. Those that do not have it are not used.
    Exact(Level),
}

impl Arithmetic {
    /// Whether all machines use one level.
    pub(super) fn is_exact(self) -> bool {
        self != Self::Best
    }

    /// The level that all machines use, if there is one, among machines with these best levels.
    pub(super) fn level(self, machines: impl Iterator<Item = Level>) -> Option<Level> {
        match self {
            Self::Best => None,
            Self::Common => machines.min(),
            Self::Exact(level) => Some(level),
        }
    }

    /// Why a machine with this best level cannot be used, if so.
    pub(super) fn excludes(self, best: Level) -> Option<String> {
        match self {
            Self::Exact(level) if best < level => {
                Some(format!("it computes with {best} at best, and this cluster exactly with {level}"))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_level_for_all_is_the_lowest_until_it_is_fixed() {
        let machines = [Level::Amx, Level::Avx2, Level::Avx512];
        let check = |arithmetic: Arithmetic, level: Option<Level>, unused: [bool; 3]| {
            assert_eq!(arithmetic.level(machines.into_iter()), level, "{arithmetic:?}");
            assert_eq!(machines.map(|best| arithmetic.excludes(best).is_some()), unused, "{arithmetic:?}");
        };
        check(Arithmetic::Best, None, [false; 3]);
        check(Arithmetic::Common, Some(Level::Avx2), [false; 3]);
        check(Arithmetic::Exact(Level::Avx2), Some(Level::Avx2), [false; 3]);
        check(Arithmetic::Exact(Level::Avx512), Some(Level::Avx512), [false, true, false]);
    }
}
