"""Golden numbers of TIS, IcePop and OPSM."""

import torch

from relax.algorithms import corrections

NAN, INF = float("nan"), float("inf")
GAPS_BT = torch.tensor([[-1.0, 0.0, 0.5, 1.2]])
ZEROS_BT, ONES_BT = torch.zeros(1, 4), torch.ones(1, 4)


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=0)


def test_tis_golden():
    found_BT = corrections.tis_weight(GAPS_BT, ZEROS_BT, ONES_BT)
    close(found_BT, [[0.36787944, 1, 1.64872127, 2]])
    found_BT = corrections.tis_weight(GAPS_BT, ZEROS_BT, ONES_BT, tis_clip_low=0.5, tis_clip=1.5)
    close(found_BT, [[0.5, 1, 1.5, 1.5]])


def test_icepop_golden():
    found_BT = corrections.icepop_weight(GAPS_BT, ZEROS_BT, ONES_BT, tis_clip_low=0.5, tis_clip=2.0)
    close(found_BT, [[0, 1, 1.64872127, 0]])
    ends_BT = corrections.icepop_weight(ZEROS_BT, ZEROS_BT, ONES_BT, tis_clip_low=1.0, tis_clip=1.0)
    assert ends_BT.tolist() == [[1, 1, 1, 1]]


def test_opsm_golden():
    logp_BT = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, NAN]])
    old_BT = torch.tensor([[-0.9, -0.8], [-0.9, -0.8], [-1.1, -0.95], [-0.5, INF]])
    advantage_BT = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]]).expand(4, 2)
    mask_BT = torch.tensor([[1.0, 1], [1, 1], [1, 1], [1, 0]])
    kept_BT = corrections.sequence_keep_mask(logp_BT, old_BT, advantage_BT, mask_BT, opsm_delta=0.1)
    # means of old - logp: .15, .15, -.025, .5
    assert kept_BT.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
    kept_BT = corrections.sequence_keep_mask(
        logp_BT, old_BT, advantage_BT, mask_BT.bool(), opsm_delta=0.2
    )
    assert kept_BT.tolist() == [[True, True], [True, True], [True, True], [False, False]]


def test_corrections_are_constants_and_nothing_outside_the_mask_counts():
    old_BT = torch.tensor([[-1.0, NAN, INF]], requires_grad=True)
    rollout_BT, mask_BT = torch.tensor([[-2.0, INF, NAN]]), torch.tensor([[1, 0, 0]])
    for found_BT in (
        corrections.tis_weight(old_BT, rollout_BT, mask_BT),
        corrections.icepop_weight(old_BT, rollout_BT, mask_BT, tis_clip_low=0.0, tis_clip=5.0),
        corrections.sequence_keep_mask(old_BT, rollout_BT, ONES_BT[:, :3], mask_BT),
    ):
        assert not found_BT.requires_grad
        assert found_BT[0, 0] > 0 and found_BT[0, 1:].tolist() == [0, 0]


def test_log_ratios_of_99_stay_finite():
    gap_BT = torch.tensor([[99.0, -99.0]])
    found_BT = corrections.tis_weight(gap_BT, ZEROS_BT[:, :2], ONES_BT[:, :2], tis_clip=1e30)
    assert torch.isfinite(found_BT).all()
