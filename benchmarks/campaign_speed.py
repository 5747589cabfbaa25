"""How much faster is a campaign of attacks in several processes?"""

from experiments.scaffold import command
from experiments.speed.options import CampaignOptions

main = command("campaign_speed", CampaignOptions, "experiments.speed.campaign_speed")

if __name__ == "__main__":
    raise SystemExit(main())
